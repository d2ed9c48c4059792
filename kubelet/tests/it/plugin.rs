//! Plugins at a device manager: registration, lists, allocation, restarts, the end.

use std::{fs, path::Path, sync::Arc};

use rouse_cluster::device_manager::{DeviceHealth, DeviceManager};
use rouse_kubelet::{Error, PluginServer};
use tempfile::TempDir;

use crate::scripted_plugin::ScriptedPlugin;

const RESOURCE: &str = "rouse.dev/gpu-0a1b2c3d4e";
const SLOTS: [&str; 2] = ["gpu-0a1b2c3d4e-0", "gpu-0a1b2c3d4e-1"];

struct PluginTest {
    manager: DeviceManager,
    plugin: Arc<ScriptedPlugin>,
    server: PluginServer,
    _root: TempDir,
}

impl PluginTest {
    /// A plugin with two healthy slots that the manager knows.
    async fn start() -> Self {
        let root = tempfile::tempdir().unwrap();
        let manager = DeviceManager::start(root.path()).await.unwrap();
        let plugin = ScriptedPlugin::new(&SLOTS);
        let server = serve(manager.plugin_folder(), &plugin).await;
        let test = Self { manager, plugin, server, _root: root };
        test.until(health([true, true])).await;
        test
    }

    async fn until(&self, health: DeviceHealth) {
        let condition = format!("devices {health:?}");
        self.manager.until_devices(RESOURCE, &condition, |found| *found == health).await.unwrap();
    }
}

async fn serve(folder: &Path, plugin: &Arc<ScriptedPlugin>) -> PluginServer {
    PluginServer::serve(folder, RESOURCE.to_owned(), Arc::clone(plugin)).await.unwrap()
}

async fn registered(server: &PluginServer, wanted: bool) {
    server.is_registered().wait_for(|registered| *registered == wanted).await.unwrap();
}

fn health(healthy: [bool; 2]) -> DeviceHealth {
    SLOTS.iter().map(|slot| (*slot).to_owned()).zip(healthy).collect()
}

/// The plugin's sockets in the kubelet's folder.
fn sockets(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name != "kubelet.sock").collect()
}

/// The manager connects to the plugin before it answers the registration, so the plugin listens by then.
#[tokio::test]
async fn a_plugin_listens_and_then_registers_once() {
    let test = PluginTest::start().await;
    registered(&test.server, true).await;
    assert_eq!(test.manager.registrations(RESOURCE), 1);
    assert_eq!(sockets(test.manager.plugin_folder()).len(), 1);
}

#[tokio::test]
async fn a_plugin_registers_when_the_kubelet_comes_later() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("device-plugins");
    fs::create_dir(&folder).unwrap();
    let plugin = ScriptedPlugin::new(&SLOTS);
    let server = serve(&folder, &plugin).await;
    assert!(!*server.is_registered().borrow());
    let manager = DeviceManager::start(root.path()).await.unwrap();
    manager.until_devices(RESOURCE, "devices", |found| *found == health([true, true])).await.unwrap();
}

#[tokio::test]
async fn a_folder_that_is_missing_is_an_error_at_once() {
    let root = tempfile::tempdir().unwrap();
    let plugin = ScriptedPlugin::new(&SLOTS);
    let error =
        PluginServer::serve(&root.path().join("none"), RESOURCE.to_owned(), plugin).await.unwrap_err();
    assert!(matches!(error, Error::Listen { .. }), "{error}");
}

#[tokio::test]
async fn every_change_of_the_list_reaches_the_kubelet() {
    let test = PluginTest::start().await;
    for healthy in [[true, false], [false, false], [false, true], [true, true]] {
        test.plugin.list(SLOTS.into_iter().zip(healthy));
        test.until(health(healthy)).await;
    }
    let [first, _] = SLOTS;
    test.plugin.list([(first, true)]);
    test.until([(first.to_owned(), true)].into()).await;
    assert_eq!(test.manager.registrations(RESOURCE), 1);
}

#[tokio::test]
async fn a_container_gets_what_the_plugin_grants() {
    let test = PluginTest::start().await;
    let granted = test.manager.allocate("team/engine", RESOURCE, 2).await.unwrap();
    assert_eq!(granted.ids, SLOTS);
    assert_eq!(granted.allocation, ScriptedPlugin::granted(&SLOTS));
    let error = test.manager.allocate("team/other", RESOURCE, 1).await.unwrap_err();
    assert!(error.contains("0 available"), "{error}");
    test.manager.release("team/engine");
    test.manager.allocate("team/other", RESOURCE, 1).await.unwrap();
}

#[tokio::test]
async fn the_kubelet_gets_the_sentence_of_a_refusal() {
    let test = PluginTest::start().await;
    test.plugin.refuse("node-b took slot 0 a moment ago");
    let error = test.manager.allocate("engine", RESOURCE, 1).await.unwrap_err();
    assert_eq!(error, "rpc error: code = FailedPrecondition desc = node-b took slot 0 a moment ago");
}

/// A kubelet deletes all sockets and forgets all plugins when it starts.
#[tokio::test]
async fn a_plugin_registers_again_on_a_new_socket_after_a_restart_of_the_kubelet() {
    let mut test = PluginTest::start().await;
    let before = sockets(test.manager.plugin_folder());
    test.manager.restart().await.unwrap();
    test.until(health([true, true])).await;
    assert!(test.manager.registrations(RESOURCE) > 1);
    let after = sockets(test.manager.plugin_folder());
    assert_eq!(after.len(), 1, "{after:?}");
    assert_ne!(before, after);
    let [first, _] = SLOTS;
    test.plugin.list([(first, false)]);
    test.until([(first.to_owned(), false)].into()).await;
}

#[tokio::test]
async fn a_plugin_is_not_registered_while_the_kubelet_is_down() {
    let mut test = PluginTest::start().await;
    registered(&test.server, true).await;
    test.manager.stop().await;
    registered(&test.server, false).await;
    test.manager.resume().await.unwrap();
    registered(&test.server, true).await;
    test.until(health([true, true])).await;
}

/// The kubelet's sockets stay in place here: only the connection fails.
#[tokio::test]
async fn a_plugin_that_the_kubelet_gives_up_registers_again() {
    let test = PluginTest::start().await;
    test.manager.disconnect(RESOURCE);
    test.until(health([true, true])).await;
    assert!(test.manager.registrations(RESOURCE) > 1);
}

#[tokio::test]
async fn a_stopped_plugin_lists_its_devices_as_unhealthy_and_removes_its_socket() {
    let PluginTest { manager, server, _root, .. } = PluginTest::start().await;
    server.stop().await;
    manager.until_devices(RESOURCE, "unhealthy", |found| *found == health([false, false])).await.unwrap();
    assert_eq!(manager.last_list(RESOURCE), health([false, false]), "the plugin's own last list");
    assert!(sockets(manager.plugin_folder()).is_empty());
}

#[tokio::test]
async fn a_dropped_plugin_ends_like_a_stopped_one() {
    let PluginTest { manager, server, _root, .. } = PluginTest::start().await;
    let mut is_registered = server.is_registered();
    drop(server);
    // The channel ends with the task, which has then removed the socket.
    while is_registered.changed().await.is_ok() {}
    manager.until_devices(RESOURCE, "unhealthy", |found| *found == health([false, false])).await.unwrap();
    assert_eq!(manager.last_list(RESOURCE), health([false, false]));
    assert!(sockets(manager.plugin_folder()).is_empty());
}
