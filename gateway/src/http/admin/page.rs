//! The page: its files, which are part of the program.
//!
//! The files hold no data, so they need no token. The page reads everything from the admin API, with the token that a
//! person enters. It loads nothing from elsewhere, and the content security policy forbids it to.
//!
//! Files are served uncompressed: together they are a few hundred kilobytes, and a browser that has them asks only
//! whether they have changed.

use std::sync::OnceLock;

use axum::{
    extract::Path,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use rouse_net::openai::stable_hash;

use super::no_route;

/// The path below which the page's files are.
pub(super) const PATH: &str = "/ui/";

const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Headers of every answer. A browser asks each time whether a file has changed, so a new version of the gateway never
/// runs with an old script.
static HEADERS: [(HeaderName, &str); 4] = [
    (header::CACHE_CONTROL, "no-cache"),
    (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
];

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// One of the page's files.
struct PageFile {
    name: &'static str,
    content_type: &'static str,
    bytes: &'static [u8],
}

macro_rules! page_files {
    ($($name:literal: $content_type:expr),* $(,)?) => {
        &[$(PageFile {
            name: $name,
            content_type: $content_type,
            bytes: include_bytes!(concat!("../../../page/", $name)),
        }),*]
    };
}

/// Every file of the folder `gateway/page`.
const FILES: &[PageFile] = page_files! {
    "api.js": SCRIPT,
    "app.js": SCRIPT,
    "base.css": CSS,
    "chat.js": SCRIPT,
    "clock.js": SCRIPT,
    "completion.js": SCRIPT,
    "dom.js": SCRIPT,
    "facts.js": SCRIPT,
    "fleet.js": SCRIPT,
    "format.js": SCRIPT,
    "icon.svg": SVG,
    "index.html": HTML,
    "lanes.js": SCRIPT,
    "live.js": SCRIPT,
    "log.js": SCRIPT,
    "login.js": SCRIPT,
    "memory.js": SCRIPT,
    "model.js": SCRIPT,
    "models.js": SCRIPT,
    "operations.js": SCRIPT,
    "parts.css": CSS,
    "requests.js": SCRIPT,
    "sse.js": SCRIPT,
    "store.js": SCRIPT,
    "theme.js": SCRIPT,
    "timeline.js": SCRIPT,
    "types.js": SCRIPT,
    "views.css": CSS,
    "why.js": SCRIPT,
};

/// Whether this is a path of the page, which needs no token.
pub(super) fn is_page_path(path: &str) -> bool {
    path == "/" || path.starts_with(PATH)
}

/// `GET /`: leads to the page.
pub(super) async fn redirect() -> Response {
    (StatusCode::SEE_OTHER, [(header::LOCATION, PATH)]).into_response()
}

/// `GET /ui/`: the page itself.
pub(super) async fn index(headers: HeaderMap) -> Response {
    find("index.html", &headers).unwrap_or_else(|| StatusCode::NOT_FOUND.into_response())
}

/// `GET /ui/{name}`: one of its files.
pub(super) async fn file(method: Method, headers: HeaderMap, uri: Uri, Path(name): Path<String>) -> Response {
    find(&name, &headers).unwrap_or_else(|| no_route(method.as_str(), uri.path()))
}

/// Answers with the file of this name. `headers`: those of the request.
fn find(name: &str, headers: &HeaderMap) -> Option<Response> {
    let (file, tag) = FILES.iter().zip(entity_tags()).find(|(file, _)| file.name == name)?;
    let mut response = if is_known(headers, tag) {
        StatusCode::NOT_MODIFIED.into_response()
    } else {
        ([(header::CONTENT_TYPE, file.content_type)], file.bytes).into_response()
    };
    for (name, value) in &HEADERS {
        response.headers_mut().insert(name.clone(), HeaderValue::from_static(value));
    }
    response.headers_mut().insert(header::ETAG, tag.clone());
    Some(response)
}

/// The entity tag of each of [`FILES`].
fn entity_tags() -> &'static [HeaderValue] {
    static TAGS: OnceLock<Vec<HeaderValue>> = OnceLock::new();
    TAGS.get_or_init(|| {
        let tag = |file: &PageFile| HeaderValue::try_from(format!("\"{:016x}\"", stable_hash(file.bytes)));
        FILES.iter().map(|file| tag(file).unwrap_or_else(|_| HeaderValue::from_static("\"\""))).collect()
    })
}

/// Whether the client already has the file with this tag.
fn is_known(headers: &HeaderMap, tag: &HeaderValue) -> bool {
    let sent = headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let mut tags = sent.flat_map(|tags| tags.split(',')).map(|tag| tag.trim().trim_start_matches("W/"));
    tags.any(|known| known == "*" || known.as_bytes() == tag.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        io::Write as _,
        process::{Command, Stdio},
    };

    use super::*;

    /// The limit of the page's files, compressed as a proxy would, in bytes.
    const MAX_COMPRESSED_BYTES: usize = 100 * 1024;

    fn get(name: &str, headers: &[(HeaderName, &str)]) -> Response {
        let headers =
            headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_str(value).unwrap()));
        let headers: HeaderMap = headers.collect();
        find(name, &headers).expect("the file exists")
    }

    #[test]
    fn every_file_of_the_folder_is_listed_and_served_with_its_type() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("page");
        let present: BTreeSet<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let listed: BTreeSet<String> = FILES.iter().map(|file| file.name.to_owned()).collect();
        assert_eq!(listed, present);
        for file in FILES {
            let expected = match file.name.rsplit_once('.').unwrap().1 {
                "css" => CSS,
                "html" => HTML,
                "js" => SCRIPT,
                "svg" => SVG,
                other => panic!("no type for .{other}"),
            };
            assert_eq!(file.content_type, expected, "{}", file.name);
        }
    }

    #[test]
    fn the_page_is_small() {
        let mut gzip = Command::new("gzip")
            .args(["-9", "-c"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("gzip measures the files");
        let mut input = gzip.stdin.take().unwrap();
        let writer = std::thread::spawn(move || {
            for file in FILES {
                input.write_all(file.bytes).unwrap();
            }
        });
        let compressed = gzip.wait_with_output().unwrap().stdout.len();
        writer.join().unwrap();
        assert!((1..=MAX_COMPRESSED_BYTES).contains(&compressed), "{compressed} bytes");
    }

    #[test]
    fn a_file_that_the_browser_has_is_not_sent_again() {
        let first = get("index.html", &[]);
        let tag = first.headers()[header::ETAG].to_str().unwrap().to_owned();
        for (sent, status) in [
            (tag.clone(), 304),
            (format!("W/{tag}"), 304),
            (format!("\"other\", {tag}"), 304),
            ("*".to_owned(), 304),
            ("\"other\"".to_owned(), 200),
        ] {
            let again = get("index.html", &[(header::IF_NONE_MATCH, &sent)]);
            assert_eq!(again.status().as_u16(), status, "{sent}");
            assert_eq!(again.headers()[header::ETAG], tag.as_str());
        }
        let tags: BTreeSet<&[u8]> = entity_tags().iter().map(HeaderValue::as_bytes).collect();
        assert_eq!(tags.len(), FILES.len(), "each file has its own");
    }

    #[test]
    fn the_page_may_load_nothing_from_elsewhere() {
        let page = get("index.html", &[]);
        let policy = page.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
        assert!(policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self'; "), "{policy}");
        assert!(!policy.contains("unsafe") && !policy.contains("http"), "{policy}");
        for (name, value) in &HEADERS {
            assert_eq!(page.headers()[name], *value);
        }
        assert_eq!(page.headers()[header::CONTENT_TYPE], HTML);
    }

    #[test]
    fn a_file_that_does_not_exist_is_not_found() {
        for name in ["nothing.js", "../Cargo.toml", "index.html/", ""] {
            assert!(find(name, &HeaderMap::new()).is_none(), "{name}");
        }
    }
}
