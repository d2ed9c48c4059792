//! A namespace for one test.

use std::{
    ops::Deref,
    sync::{Arc, mpsc},
    time::Duration,
};

use anyhow::{Context as _, Result};
use k8s_openapi::{
    NamespaceResourceScope,
    api::core::v1::{Namespace as Object, ServiceAccount},
};
use kube::{
    Api, Client,
    api::{DeleteParams, ObjectMeta, PostParams},
};
use serde::de::DeserializeOwned;

use crate::{ClusterInner, wait};

/// A namespace that is deleted with its contents on drop. Dereferences to its name.
pub struct Namespace {
    name: String,
    client: Client,
    inner: Arc<ClusterInner>,
}

impl Namespace {
    pub(crate) async fn create(inner: Arc<ClusterInner>, name: &str) -> Result<Self> {
        let client = inner.users.client(inner.users.admin(), inner.api_server).await?;
        let name = format!("{name}-{}", inner.next_number()?);
        let object = Object {
            metadata: ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() },
            ..Object::default()
        };
        Api::all(client.clone())
            .create(&PostParams::default(), &object)
            .await
            .context("cannot create a namespace")?;
        let namespace = Self { name, client, inner };
        // No Pod is admitted before the controllers have created the service account.
        wait::until(&namespace.api::<ServiceAccount>(), "default", "it to exist", Option::is_some).await?;
        Ok(namespace)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the admin's API for this kind in the namespace.
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned,
    {
        Api::namespaced(self.client.clone(), &self.name)
    }

    /// The admin's client for the runtime that created the namespace.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    pub(crate) fn inner(&self) -> &Arc<ClusterInner> {
        &self.inner
    }
}

impl Deref for Namespace {
    type Target = str;

    fn deref(&self) -> &str {
        &self.name
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let (inner, name) = (Arc::clone(&self.inner), self.name.clone());
        // The deletion keeps a finished test's Pods from running beside the next test's. The drop waits for it, because
        // aws-lc frees its entropy source at process exit, and a TLS handshake that begins then aborts. Without an API
        // server the Pods end with the cluster.
        #[expect(clippy::disallowed_methods, reason = "a test's channel")]
        let (done_tx, done_rx) = mpsc::channel();
        self.inner.handle.spawn(async move {
            if let Ok(client) = inner.users.client(inner.users.admin(), inner.api_server).await {
                Api::<Object>::all(client).delete(&name, &DeleteParams::background()).await.ok();
            }
            done_tx.send(()).ok();
        });
        done_rx.recv_timeout(Duration::from_secs(2)).ok();
    }
}
