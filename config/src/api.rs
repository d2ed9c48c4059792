//! Reads `api`: the number of serving threads, and the origins of pages that may call it (`api.cors`).

use super::{
    reader::{ConfigReader, ConfigSection},
    yaml::YamlNode,
};

/// More threads than any machine has cores that are worth a listener each.
const MAX_API_THREADS: usize = 256;

/// The origins, as browsers write them. An empty list allows none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CorsConfig {
    pub origins: Vec<String>,
    /// The list contains `"*"`.
    pub any: bool,
}

/// Returns the number of threads, if the file sets it, and the origins.
pub(super) fn read_api(reader: &mut ConfigReader, root: &mut ConfigSection) -> (Option<usize>, CorsConfig) {
    root.sub(reader, "api", |reader, api| {
        let threads = api.read(reader, "threads", |reader, node| {
            let threads = reader.number(node)?;
            if !(1..=MAX_API_THREADS).contains(&threads) {
                reader.note(node.at, format_args!("must be between 1 and {MAX_API_THREADS}"));
                return None;
            }
            Some(threads)
        });
        let cors = api.sub(reader, "cors", |reader, cors| {
            let origins = cors.read(reader, "origins", |reader, node| reader.list(node, origin));
            let mut origins = origins.unwrap_or_default();
            let any = origins.iter().any(|origin| origin == "*");
            origins.retain(|origin| origin != "*");
            CorsConfig { origins, any }
        });
        (threads, cors)
    })
}

fn origin(reader: &mut ConfigReader, node: &YamlNode) -> Option<String> {
    let text = reader.text(node)?;
    let exact = text.split_once("://").is_some_and(|(scheme, host)| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-._:[]".contains(c);
        !scheme.is_empty() && !host.is_empty() && host.chars().all(allowed)
    });
    if text == "*" || exact {
        return Some(text.to_ascii_lowercase());
    }
    reader.note(
        node.at,
        format_args!(
            "'{text}' is not an origin: write scheme://host or scheme://host:port, without a path, or \"*\""
        ),
    );
    None
}
