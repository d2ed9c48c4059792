//! Builds images, and pushes them to a registry by plain HTTP requests.

use std::{collections::BTreeMap, fs, process::Command};

use aws_lc_rs::digest::{Context, Digest, SHA256};
use rouse_cluster::node::NodeRegistry;
use serde_json::{Value, json};

use crate::client::{TestClient, TestResponse};

/// Tar files consist of blocks of this size.
const BLOCK: usize = 512;
/// How many zeros are hashed and sent at once.
const PIECE: usize = 1 << 20;

/// An uncompressed layer: the files' bytes, and zeros that are made when they are needed.
pub(crate) struct ImageLayer {
    bytes: Vec<u8>,
    zeros: u64,
}

impl ImageLayer {
    /// A layer with these files, by their paths without the first slash, and one file of this many zeros.
    pub(crate) fn new(files: &BTreeMap<String, Vec<u8>>, large: u64) -> Self {
        let mut bytes = Vec::new();
        for (path, content) in files {
            bytes.extend(tar_header(path, content.len() as u64));
            bytes.extend(content);
            bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        }
        bytes.extend(tar_header("large", large));
        // Two empty blocks end it.
        let zeros = large.next_multiple_of(BLOCK as u64) + 2 * BLOCK as u64;
        Self { bytes, zeros }
    }

    fn len(&self) -> u64 {
        self.bytes.len() as u64 + self.zeros
    }

    /// Passes all bytes on in pieces.
    fn for_each(&self, mut take: impl FnMut(&[u8])) {
        take(&self.bytes);
        let zeros = vec![0; PIECE];
        let mut left = self.zeros;
        while left > 0 {
            let piece = left.min(PIECE as u64);
            take(&zeros[..usize::try_from(piece).unwrap()]);
            left -= piece;
        }
    }

    fn digest(&self) -> String {
        let mut context = Context::new(&SHA256);
        self.for_each(|piece| context.update(piece));
        name(&context.finish())
    }
}

/// The files of a shell: the program, and the libraries that it is linked with.
pub(crate) fn shell() -> BTreeMap<String, Vec<u8>> {
    let shell = "/bin/sh";
    let linked = Command::new("ldd").arg(shell).output().unwrap();
    let linked = String::from_utf8(linked.stdout).unwrap();
    let paths = linked.split_whitespace().filter(|word| word.starts_with('/')).chain([shell]);
    paths.map(|path| (path.trim_start_matches('/').to_owned(), fs::read(path).unwrap())).collect()
}

/// Pushes an image of one layer: `name` is its repository and tag. `credentials` is the value of the header
/// Authorization, or empty.
pub(crate) fn push(registry: &NodeRegistry, image: &str, layer: &ImageLayer, credentials: &str) {
    let (repository, tag) = image.split_once(':').unwrap();
    let push = ImagePush { client: TestClient::new(registry.address()), repository, credentials };
    let layer_digest = layer.digest();
    push.blob(&layer_digest, layer.len(), |take| layer.for_each(take));
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let config = json!({
        "architecture": architecture, "os": "linux", "config": {},
        "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
    })
    .to_string();
    let config_digest = name(&aws_lc_rs::digest::digest(&SHA256, config.as_bytes()));
    push.blob(&config_digest, config.len() as u64, |take| take(config.as_bytes()));
    let described = |kind: &str, digest: &str, size: u64| -> Value {
        json!({"mediaType": format!("application/vnd.oci.image.{kind}"), "digest": digest, "size": size})
    };
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": described("config.v1+json", &config_digest, config.len() as u64),
        "layers": [described("layer.v1.tar", &layer_digest, layer.len())],
    })
    .to_string();
    let path = format!("/v2/{repository}/manifests/{tag}");
    let answer = push.send("PUT", &path, MANIFEST, manifest.len() as u64, |take| take(manifest.as_bytes()));
    assert_eq!(answer.status, 201, "{image}: {}", answer.text());
}

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

struct ImagePush<'a> {
    client: TestClient,
    repository: &'a str,
    credentials: &'a str,
}

impl ImagePush<'_> {
    /// Uploads a blob of this length.
    fn blob(&self, digest: &str, length: u64, content: impl FnOnce(&mut dyn FnMut(&[u8]))) {
        let path = format!("/v2/{}/blobs/uploads/", self.repository);
        let begun = self.send("POST", &path, "application/octet-stream", 0, |_| {});
        assert_eq!(begun.status, 202, "{}", begun.text());
        let location = begun.header("location");
        let path = location.split_once("/v2/").map(|(_, path)| format!("/v2/{path}")).unwrap();
        let path = format!("{path}&digest={digest}");
        let done = self.send("PUT", &path, "application/octet-stream", length, content);
        assert_eq!(done.status, 201, "{digest}: {}", done.text());
    }

    fn send(
        &self,
        method: &str,
        path: &str,
        media_type: &str,
        length: u64,
        content: impl FnOnce(&mut dyn FnMut(&[u8])),
    ) -> TestResponse {
        let authorization = match self.credentials {
            "" => String::new(),
            credentials => format!("Authorization: {credentials}\r\n"),
        };
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n{authorization}Content-Type: \
             {media_type}\r\nContent-Length: {length}\r\n\r\n",
            self.client.address
        );
        let mut exchange = self.client.open(head);
        content(&mut |piece: &[u8]| exchange.write(piece));
        exchange.rest()
    }
}

/// The digest as registries write it.
fn name(digest: &Digest) -> String {
    let hex: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// The header of a file that everybody may run.
fn tar_header(path: &str, size: u64) -> [u8; BLOCK] {
    let mut header = [0; BLOCK];
    let mut put = |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, path);
    put(100, "0000755\0");
    put(108, "0000000\0");
    put(116, "0000000\0");
    put(124, &format!("{size:011o}\0"));
    put(136, "00000000000\0");
    // The sum counts itself as spaces.
    put(148, "        ");
    put(156, "0");
    put(257, "ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}
