//! References of images: `nginx`, `registry.example.com:5000/team/image:1.0@sha256:…`.
//!
//! The kubelet and the container runtimes parse references by the grammar of the project `distribution/reference`. A
//! reference that breaks it is never pulled: the Pod waits with InvalidImageName for ever.

/// Registry of a reference that names none.
const DEFAULT_REGISTRY: &str = "docker.io";
/// Other name of [`DEFAULT_REGISTRY`].
const LEGACY_REGISTRY: &str = "index.docker.io";
/// Folder of the default registry for names without a folder.
const DEFAULT_FOLDER: &str = "library/";
/// Tag of a reference that has neither a tag nor a digest.
const DEFAULT_TAG: &str = "latest";
const MAX_REPOSITORY_CHARS: usize = 255;
const MAX_TAG_CHARS: usize = 128;
/// Length of a digest's hexadecimal part, by its algorithm.
const DIGEST_CHARS: [(&str, usize); 3] = [("sha256", 64), ("sha384", 96), ("sha512", 128)];

/// A valid reference, in its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ImageReference<'a> {
    /// Host of the registry, with its port if it has one.
    registry: Option<&'a str>,
    repository: &'a str,
    tag: Option<&'a str>,
    /// Digest with its algorithm.
    digest: Option<&'a str>,
}

impl<'a> ImageReference<'a> {
    /// Parses a reference.
    ///
    /// # Errors
    /// Returns what is wrong and what to write instead, to follow after the reference and a colon.
    pub(crate) fn parse(text: &'a str) -> Result<Self, &'static str> {
        if text.is_empty() {
            return Err("it is empty: write a reference such as registry.example.com/team/image:1.0");
        }
        if text.len() == 64 && is_hex(text) {
            return Err(
                "this is the id of an image: write the image's name, with @sha256: and the digest if needed",
            );
        }
        let (tagged, digest) =
            text.split_once('@').map_or((text, None), |(name, digest)| (name, Some(digest)));
        // A colon before a slash belongs to the registry's port.
        let (name, tag) = match tagged.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
            _ => (tagged, None),
        };
        let (registry, repository) = match name.split_once('/') {
            Some((first, rest)) if is_like_a_registry(first) => (Some(first), rest),
            _ => (None, name),
        };
        if registry.is_some_and(|registry| !is_registry(registry)) {
            return Err("the registry's name is invalid: write HOST or HOST:PORT before the first slash");
        }
        if repository.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err("the repository's name has uppercase letters: write it in lowercase");
        }
        if !repository.split('/').all(is_repository_part) {
            return Err(
                "the repository's name is invalid: write lowercase letters and digits, with '.', '_', '__' or '-' \
                 between them, and '/' between folders",
            );
        }
        if repository.len() > MAX_REPOSITORY_CHARS {
            return Err("the repository's name has more than 255 characters: use a shorter one");
        }
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return Err(
                "the tag is invalid: write at most 128 letters, digits, '_', '.' and '-', with no '.' or '-' at the \
                 beginning",
            );
        }
        if digest.is_some_and(|digest| !is_digest(digest)) {
            return Err("the digest is invalid: write sha256: and 64 hexadecimal digits in lowercase");
        }
        Ok(Self { registry, repository, tag, digest })
    }

    /// Returns the name under which runtimes keep the image: with a registry, and with a tag or a digest.
    ///
    /// Two references with the same name are one image. A runtime with search registries of its own may find elsewhere
    /// an image whose reference names no registry.
    pub(crate) fn canonical(&self) -> String {
        let registry = match self.registry {
            None | Some(LEGACY_REGISTRY) => DEFAULT_REGISTRY,
            Some(registry) => registry,
        };
        let is_official = registry == DEFAULT_REGISTRY && !self.repository.contains('/');
        let folder = if is_official { DEFAULT_FOLDER } else { "" };
        let repository = self.repository;
        match self.digest {
            Some(digest) => format!("{registry}/{folder}{repository}@{digest}"),
            None => format!("{registry}/{folder}{repository}:{}", self.tag.unwrap_or(DEFAULT_TAG)),
        }
    }
}

/// Whether the part before the first slash is a registry rather than a folder of the default one.
fn is_like_a_registry(first: &str) -> bool {
    first == "localhost" || first.bytes().any(|byte| matches!(byte, b'.' | b':') || byte.is_ascii_uppercase())
}

fn is_registry(text: &str) -> bool {
    let (host, port) = match text.rsplit_once(':') {
        // The colons of an IPv6 address stand in brackets.
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (text, None),
    };
    let is_port = |port: &str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let is_host = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).map_or_else(
        || host.split('.').all(is_host_part),
        |address| !address.is_empty() && address.bytes().all(|byte| byte == b':' || byte.is_ascii_hexdigit()),
    );
    is_host && port.is_none_or(is_port)
}

fn is_host_part(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with('-')
        && !text.ends_with('-')
        && text.bytes().all(|byte| byte == b'-' || byte.is_ascii_alphanumeric())
}

/// Whether it is letters and digits, with one separator between each two groups of them.
fn is_repository_part(text: &str) -> bool {
    let is_alphanumeric = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit();
    let is_separator = |text: &str| matches!(text, "." | "_" | "__") || text.bytes().all(|byte| byte == b'-');
    text.starts_with(is_alphanumeric)
        && text.ends_with(is_alphanumeric)
        // Between two neighbouring letters, the text is empty.
        && text.split(is_alphanumeric).all(is_separator)
}

fn is_tag(text: &str) -> bool {
    let is_word = |byte: u8| byte == b'_' || byte.is_ascii_alphanumeric();
    text.len() <= MAX_TAG_CHARS
        && text.bytes().next().is_some_and(is_word)
        && text.bytes().all(|byte| is_word(byte) || matches!(byte, b'.' | b'-'))
}

fn is_digest(text: &str) -> bool {
    let Some((algorithm, hex)) = text.split_once(':') else { return false };
    DIGEST_CHARS.iter().any(|(name, length)| *name == algorithm && *length == hex.len()) && is_hex(hex)
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn a_reference_has_the_name_that_runtimes_give_it() {
        for (text, name) in [
            ("nginx", "docker.io/library/nginx:latest"),
            ("image1:tag1", "docker.io/library/image1:tag1"),
            ("localhost:5000", "docker.io/library/localhost:5000"),
            ("library/nginx", "docker.io/library/nginx:latest"),
            ("docker.io/nginx", "docker.io/library/nginx:latest"),
            ("index.docker.io/nginx:1", "docker.io/library/nginx:1"),
            ("lmsysorg/sglang:v0.5.5", "docker.io/lmsysorg/sglang:v0.5.5"),
            ("localhost/a", "localhost/a:latest"),
            ("Registry/a", "Registry/a:latest"),
            ("registry.k8s.io/pause:3.10", "registry.k8s.io/pause:3.10"),
            ("127.0.0.1:5000/team/a.b_c__d---e:_x.y-Z", "127.0.0.1:5000/team/a.b_c__d---e:_x.y-Z"),
            ("[::1]:5000/a", "[::1]:5000/a:latest"),
            ("[fd00::1]/a:2", "[fd00::1]/a:2"),
        ] {
            assert_eq!(
                ImageReference::parse(text).map(|parsed| parsed.canonical()),
                Ok(name.to_owned()),
                "{text}"
            );
        }
        // A digest says which image it is, so the tag does not matter.
        for text in [format!("nginx@{DIGEST}"), format!("nginx:1.27@{DIGEST}")] {
            let name = ImageReference::parse(&text).unwrap().canonical();
            assert_eq!(name, format!("docker.io/library/nginx@{DIGEST}"));
        }
    }

    #[test]
    fn a_name_that_is_canonical_stays_as_it_is() {
        for text in ["nginx", "a.example:80/b/c:d", &format!("quay.io/x/y@{DIGEST}")] {
            let name = ImageReference::parse(text).unwrap().canonical();
            assert_eq!(ImageReference::parse(&name).unwrap().canonical(), name);
        }
    }

    #[test]
    fn what_breaks_the_grammar_is_refused_with_the_part_that_does() {
        let hex = DIGEST.split_once(':').unwrap().1;
        for (text, words) in [
            ("", "it is empty"),
            (hex, "the id of an image"),
            (" nginx", "the repository's name is invalid"),
            ("nginx ", "the repository's name is invalid"),
            ("two words", "the repository's name is invalid"),
            ("Nginx", "uppercase"),
            ("registry.example.com/Team/a", "uppercase"),
            ("a//b", "the repository's name is invalid"),
            ("/a", "the repository's name is invalid"),
            ("a/", "the repository's name is invalid"),
            ("registry.example.com/", "the repository's name is invalid"),
            ("-a", "the repository's name is invalid"),
            ("a-", "the repository's name is invalid"),
            ("a..b", "the repository's name is invalid"),
            ("a___b", "the repository's name is invalid"),
            ("a._b", "the repository's name is invalid"),
            ("größe", "the repository's name is invalid"),
            ("https://registry.example.com/a", "the registry's name is invalid"),
            ("registry.example.com:/a", "the registry's name is invalid"),
            ("registry.example.com:port/a", "the registry's name is invalid"),
            ("-registry.example.com/a", "the registry's name is invalid"),
            ("registry..example/a", "the registry's name is invalid"),
            ("[]:5000/a", "the registry's name is invalid"),
            ("nginx:", "the tag is invalid"),
            ("nginx:.1", "the tag is invalid"),
            ("nginx:1+2", "the tag is invalid"),
            ("nginx:<tag>", "the tag is invalid"),
            ("nginx@", "the digest is invalid"),
            ("nginx@sha256:abc", "the digest is invalid"),
            (format!("nginx@md5:{hex}").as_str(), "the digest is invalid"),
            (format!("nginx@sha256:{}", hex.to_uppercase()).as_str(), "the digest is invalid"),
            (format!("nginx@{DIGEST}@{DIGEST}").as_str(), "the digest is invalid"),
            (format!("nginx:{}", "x".repeat(129)).as_str(), "the tag is invalid"),
            ("x".repeat(256).as_str(), "255 characters"),
        ] {
            let refused = ImageReference::parse(text).expect_err(text);
            assert!(refused.contains(words), "{text:?}: {refused}");
        }
        assert!(ImageReference::parse(&"x".repeat(255)).is_ok());
        assert!(ImageReference::parse(&format!("nginx:{}", "x".repeat(128))).is_ok());
    }
}
