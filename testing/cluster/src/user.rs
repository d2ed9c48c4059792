//! Clients of the API server: the cluster's certificates and keys, kubeconfigs, clients.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, Result};
use k8s_openapi::api::{
    authentication::v1::{TokenRequest, TokenRequestSpec},
    core::v1::ServiceAccount,
};
use kube::{
    Api, Client, Config,
    api::{ObjectMeta, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, SanType,
};
use serde_json::{Value, json};

/// The group that RBAC never refuses.
const MASTERS_GROUP: &str = "system:masters";
/// Lifetime of a service account's token, longer than any test.
const TOKEN_SECONDS: i64 = 86_400;

/// A user name and its credentials.
#[derive(Clone, Debug)]
pub struct ClusterUser {
    name: String,
    credentials: Value,
}

impl ClusterUser {
    /// The name that the API server knows.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn with_token(name: String, token: &str) -> Self {
        Self { name, credentials: json!({ "token": token }) }
    }

    /// Clients read the token again when it changes.
    pub(crate) fn with_token_file(name: String, token: &Path) -> Self {
        Self { name, credentials: json!({ "tokenFile": token }) }
    }
}

/// The cluster's certificate authority and its certificates, in one folder.
#[derive(Clone)]
pub(crate) struct ClusterUsers {
    folder: PathBuf,
    authority: Arc<CertifiedIssuer<'static, KeyPair>>,
    admin: ClusterUser,
}

impl ClusterUsers {
    /// Creates the certificate authority and its first certificates.
    ///
    /// These are the API server's certificate for these addresses, the service accounts' key and the admin.
    pub(crate) fn new(folder: PathBuf, addresses: &[Ipv4Addr]) -> Result<Self> {
        fs::create_dir_all(&folder)?;
        let key = KeyPair::generate()?;
        fs::write(folder.join("ca.key"), key.serialize_pem())?;
        let authority = authority(key)?;
        fs::write(folder.join("ca.pem"), authority.pem())?;

        let accounts = KeyPair::generate()?;
        fs::write(folder.join("accounts.key"), accounts.serialize_pem())?;
        fs::write(folder.join("accounts.pub"), accounts.public_key_pem())?;

        let admin = ClusterUser { name: "admin".to_owned(), credentials: Value::Null };
        let mut users = Self { folder, authority: Arc::new(authority), admin };
        users.issue_server_certificate("server", addresses, &["localhost", "kubernetes.default.svc"])?;
        users.admin = users.issue_user("admin", Some(MASTERS_GROUP))?;
        Ok(users)
    }

    /// Joins the users of another process's cluster, whose folder is `base`. New certificates go into `folder`.
    pub(crate) fn join(folder: PathBuf, base: &Path) -> Result<Self> {
        fs::create_dir_all(&folder)?;
        fs::copy(base.join("ca.pem"), folder.join("ca.pem"))
            .context("cannot copy the cluster's CA certificate")?;
        let authority = authority(KeyPair::from_pem(&fs::read_to_string(base.join("ca.key"))?)?)?;
        let admin = ClusterUser { name: "admin".to_owned(), credentials: Value::Null };
        let mut users = Self { folder, authority: Arc::new(authority), admin };
        users.admin = users.issue_user("admin", Some(MASTERS_GROUP))?;
        Ok(users)
    }

    pub(crate) fn admin(&self) -> &ClusterUser {
        &self.admin
    }

    /// Issues a user with a client certificate.
    pub(crate) fn issue_user(&self, name: &str, group: Option<&str>) -> Result<ClusterUser> {
        let file = format!("user-{}", file_name(name));
        self.issue(&file, certificate_params(name, group), ExtendedKeyUsagePurpose::ClientAuth)?;
        let proof = json!({
            "client-certificate": self.file(&format!("{file}.pem")),
            "client-key": self.file(&format!("{file}.key")),
        });
        Ok(ClusterUser { name: name.to_owned(), credentials: proof })
    }

    /// Issues a server certificate for these addresses and names. The files are `FILE.pem` and `FILE.key`.
    pub(crate) fn issue_server_certificate(
        &self,
        file: &str,
        addresses: &[Ipv4Addr],
        names: &[&str],
    ) -> Result<()> {
        let mut params = certificate_params(file, None);
        params.subject_alt_names =
            addresses.iter().map(|address| SanType::IpAddress(IpAddr::V4(*address))).collect();
        for name in names {
            params.subject_alt_names.push(SanType::DnsName((*name).try_into()?));
        }
        self.issue(file, params, ExtendedKeyUsagePurpose::ServerAuth)
    }

    /// A file of the folder.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Writes a kubeconfig of this user for this address of the API server.
    pub(crate) fn kubeconfig(&self, user: &ClusterUser, server: SocketAddr) -> Result<PathBuf> {
        let path = self.file(&format!("{}-{}.kubeconfig", file_name(&user.name), server.port()));
        self.write_kubeconfig(user, server, "default", &path)?;
        Ok(path)
    }

    /// Writes a kubeconfig to this path, with this namespace.
    pub(crate) fn write_kubeconfig(
        &self,
        user: &ClusterUser,
        server: SocketAddr,
        namespace: &str,
        path: &Path,
    ) -> Result<()> {
        // JSON is valid YAML.
        let text = self.kubeconfig_json(user, server, namespace).to_string();
        fs::write(path, text).with_context(|| path.display().to_string())
    }

    /// Creates a client for the caller's runtime.
    pub(crate) async fn client(&self, user: &ClusterUser, server: SocketAddr) -> Result<Client> {
        let kubeconfig = Kubeconfig::from_yaml(&self.kubeconfig_json(user, server, "default").to_string())?;
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        Ok(Client::try_from(config)?)
    }

    fn kubeconfig_json(&self, user: &ClusterUser, server: SocketAddr, namespace: &str) -> Value {
        let cluster =
            json!({ "server": format!("https://{server}"), "certificate-authority": self.file("ca.pem") });
        let context = json!({ "cluster": "test", "user": user.name, "namespace": namespace });
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "test", "cluster": cluster }],
            "users": [{ "name": user.name, "user": user.credentials }],
            "contexts": [{ "name": "test", "context": context }],
            "current-context": "test",
        })
    }

    fn issue(&self, file: &str, mut params: CertificateParams, usage: ExtendedKeyUsagePurpose) -> Result<()> {
        params.extended_key_usages = vec![usage];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.authority)?;
        fs::write(self.file(&format!("{file}.pem")), certificate.pem())?;
        fs::write(self.file(&format!("{file}.key")), key.serialize_pem())?;
        Ok(())
    }
}

/// Creates the authority with this key. Certificates of the authority differ only in their serial number, so each of
/// them verifies everything that the key has signed.
fn authority(key: KeyPair) -> Result<CertifiedIssuer<'static, KeyPair>> {
    let mut params = certificate_params("rouse test cluster", None);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    Ok(CertifiedIssuer::self_signed(params, key)?)
}

/// The API server reads a user's name and group from the certificate's subject.
fn certificate_params(name: &str, group: Option<&str>) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    if let Some(group) = group {
        params.distinguished_name.push(DnType::OrganizationName, group);
    }
    params
}

fn file_name(user: &str) -> String {
    user.replace([':', '/'], "-")
}

/// Creates a service account if it is missing, with a new token.
pub(crate) async fn service_account(client: Client, namespace: &str, name: &str) -> Result<ClusterUser> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client, namespace);
    let account = ServiceAccount {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        ..ServiceAccount::default()
    };
    match accounts.create(&PostParams::default(), &account).await {
        Err(kube::Error::Api(status)) if status.is_already_exists() => {}
        outcome => drop(outcome.with_context(|| format!("service account {namespace}/{name}"))?),
    }
    let request = TokenRequest {
        spec: TokenRequestSpec { expiration_seconds: Some(TOKEN_SECONDS), ..TokenRequestSpec::default() },
        ..TokenRequest::default()
    };
    let response = accounts.create_token_request(name, &PostParams::default(), &request).await?;
    let token = response.status.context("the token request returned no token")?.token;
    Ok(ClusterUser::with_token(account_name(namespace, name), &token))
}

/// The user name of a service account.
pub(crate) fn account_name(namespace: &str, account: &str) -> String {
    format!("system:serviceaccount:{namespace}:{account}")
}
