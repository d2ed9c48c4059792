//! Prepares a Pod's dependencies: its volumes as real folders, and its ConfigMaps and Secrets.
//!
//! emptyDir, hostPath, configMap, secret, downwardAPI and projected volumes (service account tokens too) are supported.
//! For other volumes the Pod's events say that they are not supported, and it waits forever, like a Pod whose volume
//! cannot be attached. Files of labels and annotations follow the Pod; files of ConfigMaps and Secrets stay as they
//! were at the start.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use k8s_openapi::{
    ByteString,
    api::{
        authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec},
        core::v1::{
            ConfigMap, Container, DownwardAPIVolumeFile, EnvFromSource, EnvVarSource, KeyToPath, Pod, Secret,
            ServiceAccount, ServiceAccountTokenProjection, Volume,
        },
    },
};
use kube::{Api, Client, ResourceExt as _, api::PostParams};

use super::launch;

type KeyedBytes = BTreeMap<String, Vec<u8>>;

/// A Pod's prepared dependencies and their paths.
#[derive(Debug, Default)]
pub(super) struct PreparedPod {
    folder: PathBuf,
    /// Only those that exist.
    config_maps: BTreeMap<String, KeyedBytes>,
    secrets: BTreeMap<String, KeyedBytes>,
    volumes: BTreeMap<String, PathBuf>,
    token: Option<PathBuf>,
    kubeconfig: Option<PathBuf>,
}

/// Fetches and writes all dependencies into `folder`.
///
/// # Errors
/// A dependency is missing or not supported; a later retry may succeed.
pub(super) async fn prepare(client: &Client, pod: &Pod, folder: &Path) -> Result<PreparedPod> {
    let mut prepared = PreparedPod { folder: folder.to_owned(), ..PreparedPod::default() };
    fs::create_dir_all(folder)?;
    prepared.fetch(client, pod).await?;
    let spec = pod.spec.clone().unwrap_or_default();
    for volume in spec.volumes.iter().flatten() {
        let real = prepared
            .create_volume(client, pod, volume)
            .await
            .with_context(|| format!("volume {}", volume.name))?;
        prepared.volumes.insert(volume.name.clone(), real);
    }
    Ok(prepared)
}

/// The names of all ConfigMaps and Secrets that the Pod references.
fn referenced_objects(spec: &k8s_openapi::api::core::v1::PodSpec) -> (Vec<String>, Vec<String>) {
    let (mut maps, mut secrets) = (Vec::new(), Vec::new());
    for container in spec.containers.iter().chain(spec.init_containers.iter().flatten()) {
        for source in container.env_from.iter().flatten() {
            maps.extend(source.config_map_ref.iter().map(|map| map.name.clone()));
            secrets.extend(source.secret_ref.iter().map(|secret| secret.name.clone()));
        }
        for source in container.env.iter().flatten().filter_map(|variable| variable.value_from.as_ref()) {
            maps.extend(source.config_map_key_ref.iter().map(|map| map.name.clone()));
            secrets.extend(source.secret_key_ref.iter().map(|secret| secret.name.clone()));
        }
    }
    for volume in spec.volumes.iter().flatten() {
        maps.extend(volume.config_map.iter().map(|map| map.name.clone()));
        secrets.extend(volume.secret.iter().filter_map(|secret| secret.secret_name.clone()));
        for source in volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten()) {
            maps.extend(source.config_map.iter().map(|map| map.name.clone()));
            secrets.extend(source.secret.iter().map(|secret| secret.name.clone()));
        }
    }
    (maps, secrets)
}

impl PreparedPod {
    /// Fetches the ConfigMaps and Secrets again, for containers that lacked one.
    ///
    /// # Errors
    /// Errors of the API server.
    pub(super) async fn fetch(&mut self, client: &Client, pod: &Pod) -> kube::Result<()> {
        let namespace = pod.namespace().unwrap_or_default();
        let spec = pod.spec.clone().unwrap_or_default();
        let (config_maps, secrets) = referenced_objects(&spec);
        let api: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace);
        for name in config_maps {
            if let Some(map) = api.get_opt(&name).await? {
                let text = map.data.into_iter().flatten().map(|(key, value)| (key, value.into_bytes()));
                let bytes =
                    map.binary_data.into_iter().flatten().map(|(key, ByteString(value))| (key, value));
                self.config_maps.insert(name, text.chain(bytes).collect());
            }
        }
        let api: Api<Secret> = Api::namespaced(client.clone(), &namespace);
        for name in secrets {
            if let Some(secret) = api.get_opt(&name).await? {
                let bytes = secret.data.into_iter().flatten().map(|(key, ByteString(value))| (key, value));
                self.secrets.insert(name, bytes.collect());
            }
        }
        Ok(())
    }

    /// The Pod's own folder, which is its processes' working folder.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The file of its service account's token, if any.
    pub(super) fn token(&self) -> Option<&Path> {
        self.token.as_deref()
    }

    pub(super) fn kubeconfig(&self) -> Option<&Path> {
        self.kubeconfig.as_deref()
    }

    pub(super) fn set_kubeconfig(&mut self, path: PathBuf) {
        self.kubeconfig = Some(path);
    }

    /// This container's mount paths and their folders, longest first.
    pub(super) fn mounts(&self, container: &Container) -> Vec<(String, PathBuf)> {
        let mut mounts: Vec<_> = container
            .volume_mounts
            .iter()
            .flatten()
            .filter_map(|mount| {
                let folder = self.volumes.get(&mount.name)?;
                let folder =
                    mount.sub_path.as_deref().map_or_else(|| folder.clone(), |path| folder.join(path));
                Some((mount.mount_path.trim_end_matches('/').to_owned(), folder))
            })
            .collect();
        mounts.sort_by_key(|(path, _)| std::cmp::Reverse(path.len()));
        mounts
    }

    /// All variables from this source. An optional source that is missing adds none.
    pub(super) fn env_from(&self, source: &EnvFromSource) -> Result<BTreeMap<String, String>, String> {
        let (kind, name, optional, data) = if let Some(map) = &source.config_map_ref {
            ("configmap", &map.name, map.optional, self.config_maps.get(&map.name))
        } else if let Some(secret) = &source.secret_ref {
            ("secret", &secret.name, secret.optional, self.secrets.get(&secret.name))
        } else {
            return Ok(BTreeMap::new());
        };
        if data.is_none() && optional != Some(true) {
            return Err(format!("{kind} {name:?} not found"));
        }
        let text = |value: &Vec<u8>| String::from_utf8_lossy(value).into_owned();
        Ok(data.into_iter().flatten().map(|(key, value)| (key.clone(), text(value))).collect())
    }

    /// One value of a ConfigMap or Secret; `None` if it is optional and missing.
    pub(super) fn env_value(&self, source: &EnvVarSource) -> Result<Option<String>, String> {
        let (kind, name, key, optional, data) = if let Some(map) = &source.config_map_key_ref {
            ("configmap", &map.name, &map.key, map.optional, self.config_maps.get(&map.name))
        } else if let Some(secret) = &source.secret_key_ref {
            ("secret", &secret.name, &secret.key, secret.optional, self.secrets.get(&secret.name))
        } else {
            return Err("podrunner does not support this valueFrom".to_owned());
        };
        match data.and_then(|data| data.get(key)) {
            Some(value) => Ok(Some(String::from_utf8_lossy(value).into_owned())),
            None if optional == Some(true) => Ok(None),
            None => Err(format!("{kind} {name:?} has no key {key:?}, or does not exist")),
        }
    }

    /// Rewrites the files that follow the Pod's labels and annotations.
    pub(super) fn update_downward_files(&self, pod: &Pod) -> io::Result<()> {
        for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
            let Some(folder) = self.volumes.get(&volume.name) else { continue };
            let downward_items = volume.downward_api.iter().flat_map(|source| source.items.iter().flatten());
            let sources = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
            let projected = sources.filter_map(|source| source.downward_api.as_ref());
            let projected = projected.flat_map(|source| source.items.iter().flatten());
            for (path, bytes) in downward_items.chain(projected).filter_map(|item| downward_file(pod, item)) {
                if fs::read(folder.join(&path)).ok().as_ref() != Some(&bytes) {
                    write_atomically(folder, &path, &bytes)?;
                }
            }
        }
        Ok(())
    }

    async fn create_volume(&mut self, client: &Client, pod: &Pod, volume: &Volume) -> Result<PathBuf> {
        if let Some(host) = &volume.host_path {
            return Ok(host.path.clone().into());
        }
        let folder = self.folder.join("volumes").join(&volume.name);
        fs::create_dir_all(&folder)?;
        let mut files = KeyedBytes::new();
        if volume.empty_dir.is_some() {
        } else if let Some(map) = &volume.config_map {
            files = select_keys(self.config_maps.get(&map.name), map.items.as_deref(), map.optional)
                .with_context(|| format!("configmap {:?}", map.name))?;
        } else if let Some(secret) = &volume.secret {
            let name = secret.secret_name.as_deref().unwrap_or_default();
            files = select_keys(self.secrets.get(name), secret.items.as_deref(), secret.optional)
                .with_context(|| format!("secret {name:?}"))?;
        } else if let Some(source) = &volume.downward_api {
            files.extend(source.items.iter().flatten().filter_map(|item| downward_file(pod, item)));
        } else if let Some(projected) = &volume.projected {
            for source in projected.sources.iter().flatten() {
                if let Some(map) = &source.config_map {
                    let found = self.config_maps.get(&map.name);
                    files.extend(
                        select_keys(found, map.items.as_deref(), map.optional)
                            .with_context(|| format!("configmap {:?}", map.name))?,
                    );
                }
                if let Some(secret) = &source.secret {
                    let found = self.secrets.get(&secret.name);
                    files.extend(
                        select_keys(found, secret.items.as_deref(), secret.optional)
                            .with_context(|| format!("secret {:?}", secret.name))?,
                    );
                }
                if let Some(source) = &source.downward_api {
                    files.extend(source.items.iter().flatten().filter_map(|item| downward_file(pod, item)));
                }
                if let Some(projection) = &source.service_account_token {
                    files.insert(
                        projection.path.clone(),
                        request_token(client, pod, projection).await?.into_bytes(),
                    );
                    if projection.audience.is_none() {
                        self.token = Some(folder.join(&projection.path));
                    }
                }
            }
        } else {
            bail!("podrunner does not support volumes of this kind");
        }
        for (path, bytes) in files {
            write_atomically(&folder, &path, &bytes)?;
        }
        Ok(folder)
    }
}

/// Selects the requested keys, by their target path.
fn select_keys(
    data: Option<&KeyedBytes>,
    items: Option<&[KeyToPath]>,
    optional: Option<bool>,
) -> Result<KeyedBytes> {
    let optional = optional == Some(true);
    let Some(data) = data else {
        if optional {
            return Ok(KeyedBytes::new());
        }
        bail!("does not exist");
    };
    let Some(items) = items else { return Ok(data.clone()) };
    let mut files = KeyedBytes::new();
    for item in items {
        match data.get(&item.key) {
            Some(bytes) => drop(files.insert(item.path.clone(), bytes.clone())),
            None if optional => {}
            None => bail!("has no key {:?}", item.key),
        }
    }
    Ok(files)
}

fn downward_file(pod: &Pod, item: &DownwardAPIVolumeFile) -> Option<(String, Vec<u8>)> {
    let field = item.field_ref.as_ref()?;
    Some((item.path.clone(), launch::metadata(pod, &field.field_path)?.into_bytes()))
}

/// Requests a token that is valid as long as the Pod's object exists.
async fn request_token(
    client: &Client,
    pod: &Pod,
    projection: &ServiceAccountTokenProjection,
) -> Result<String> {
    let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone());
    let account = account.unwrap_or_else(|| "default".to_owned());
    let bound = BoundObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: pod.metadata.name.clone(),
        uid: pod.metadata.uid.clone(),
    };
    let request = TokenRequest {
        spec: TokenRequestSpec {
            audiences: projection.audience.iter().cloned().collect(),
            bound_object_ref: Some(bound),
            expiration_seconds: projection.expiration_seconds,
        },
        ..TokenRequest::default()
    };
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    let response = accounts.create_token_request(&account, &PostParams::default(), &request).await?;
    Ok(response.status.context("the token request returned no token")?.token)
}

/// Replaces the file atomically: readers see the old or the new bytes.
fn write_atomically(folder: &Path, path: &str, bytes: &[u8]) -> io::Result<()> {
    let file = folder.join(path);
    if let Some(parent) = file.parent() {
        fs::create_dir_all(parent)?;
    }
    let temporary = folder.join(format!(".{}.new", path.replace('/', "-")));
    fs::write(&temporary, bytes)?;
    fs::rename(temporary, file)
}
