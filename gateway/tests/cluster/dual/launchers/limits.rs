//! How many engines a launcher holds, and when a launcher makes room for another engine.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use super::super::DualPodsFixture;
use crate::launched::generations;

impl DualPodsFixture {
    /// Starts an engine of this InferenceServerConfig and lets it sleep as one of `left` in the launcher.
    async fn sleeper(&self, name: &str, left: usize) -> Pod {
        self.config(name, "").await;
        self.request(name, 1, 1).await;
        self.until_launched(name).await;
        self.scale(name, 0).await;
        self.until_unbound(name, left).await
    }
}

fn of(launcher: &Pod) -> Option<&str> {
    launcher.labels().get("of").map(String::as_str)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn per_launcher_cap_a_third_configuration_ends_the_sleeper_used_longest_ago() {
    let mut duo = DualPodsFixture::with_launchers("dual-launcher-limit", 1).await;
    duo.launcher_config("launchers", "", "template", Some(2)).await;
    let first = generations(&duo.sleeper("one", 1).await);
    let launcher = duo.sleeper("two", 2).await;
    let both = generations(&launcher);
    let second = both.iter().find(|life| !first.contains(life)).unwrap();
    // A further use of the older engine makes the other one the least recently used. The next leader knows that.
    duo.scale("one", 1).await;
    duo.until_launched("one").await;
    duo.scale("one", 0).await;
    duo.until_unbound("one", 2).await;
    duo.restart("gateway-1").await;
    duo.config("three", "").await;
    duo.request("three", 1, 1).await;
    let (_, full) = duo.until_launched("three").await;
    let left = generations(&full);
    assert_eq!((full.uid(), left.len()), (launcher.uid(), 2), "{left:?}");
    assert!(left.contains(&first[0]) && !left.contains(second), "{left:?} of {both:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_edited_launcher_config_replaces_a_launcher_nobody_is_bound_to() {
    let duo = DualPodsFixture::with_launchers("dual-launcher-edit", 1).await;
    let sleeper = duo.sleeper("one", 1).await;
    // The maximum number of engines is not part of the launcher's template.
    duo.launcher_config("launchers", "", "template", Some(3)).await;
    duo.scale("one", 1).await;
    let (_, bound) = duo.until_launched("one").await;
    assert_eq!((bound.uid(), generations(&bound)), (sleeper.uid(), generations(&sleeper)));
    duo.launcher_config("launchers", "", "edited", Some(3)).await;
    duo.scale("one", 0).await;
    duo.until_launchers("one", "no launcher", |_, launchers| launchers.is_empty()).await;
    duo.scale("one", 1).await;
    let (_, next) = duo.until_launched("one").await;
    assert_eq!(of(&next), Some("edited"));
    duo.scale("one", 0).await;
    duo.until_unbound("one", 1).await;
    duo.launcher_config("launchers", "", "again", None).await;
    duo.until_launchers("one", "no launcher", |_, launchers| launchers.is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launcher_of_another_launcher_config_makes_way_for_who_asks() {
    let duo = DualPodsFixture::with_launchers("dual-launcher-other", 1).await;
    duo.launcher_config("others", "", "others", None).await;
    let launcher = duo.sleeper("one", 1).await;
    duo.config_in("others", "two", "").await;
    duo.request("two", 1, 1).await;
    let (_, other) = duo.until_launched("two").await;
    assert_ne!(other.uid(), launcher.uid());
    assert_eq!((of(&other), generations(&other).len()), (Some("others"), 1));
}
