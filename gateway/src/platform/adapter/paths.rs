//! Which of an engine's own paths the passage opens, by kind: nothing but what is named here, spelled as it is here.
//!
//! An engine's listener carries its inference and its management side by side, and the latter puts models to sleep,
//! changes weights and runs code. A list of what is forbidden would be wrong with the engine's next version, and with
//! every spelling that its router forgives and ours does not; so there is a list of what is allowed, compared byte for
//! byte. Whatever needs decoding, collapsing or trimming before it matches does not match.
//!
//! The lists are those of vLLM 0.11 to 0.17, SGLang 0.5 and llama.cpp's server. What a version lacks it answers with
//! its own 404. `/metrics` is not among them: it tells of other clients. Neither is SGLang's `/health_generate`, a GET
//! that generates.

use http::Method;

use crate::config::{Kind, Model};

const VLLM: &[&str] = &[
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/completions",
    "/v1/completions/render",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/generative_scoring",
    "/classify",
    "/pooling",
    "/v2/embed",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/v1/images/generations",
    "/tokenize",
    "/detokenize",
    "/invocations",
];

const SGLANG: &[&str] = &[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/v1/audio/transcriptions",
    "/v1/images/generations",
    "/v1/tokenize",
    "/v1/detokenize",
    "/tokenize",
    "/detokenize",
    "/generate",
    "/encode",
    "/classify",
];

const LLAMA_CPP: &[&str] = &[
    "/v1/chat/completions",
    "/v1/chat/completions/input_tokens",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v1/reranking",
    "/v1/audio/transcriptions",
    "/chat/completions",
    "/completions",
    "/completion",
    "/embeddings",
    "/embedding",
    "/responses",
    "/rerank",
    "/reranking",
    "/infill",
    "/apply-template",
    "/tokenize",
    "/detokenize",
];

const VLLM_READS: &[&str] = &["/v1/models", "/health", "/ping", "/version"];
const SGLANG_READS: &[&str] = &["/v1/models", "/health", "/model_info", "/get_model_info"];
const LLAMA_CPP_READS: &[&str] = &["/v1/models", "/models", "/health", "/v1/health"];

/// The methods with which this path of the model's engine may be asked; `None` when it may not be at all.
#[must_use]
pub fn methods(model: &Model, path: &str) -> Option<&'static [Method]> {
    const READ: &[Method] = &[Method::GET, Method::HEAD];
    const ASK: &[Method] = &[Method::POST];
    let (asks, reads) = match model.kind {
        Kind::Vllm => (VLLM, VLLM_READS),
        Kind::Sglang => (SGLANG, SGLANG_READS),
        Kind::LlamaCpp => (LLAMA_CPP, LLAMA_CPP_READS),
        Kind::Custom => {
            let passage = model.passage.iter().find(|passage| passage.path == path)?;
            return Some(if passage.reads { READ } else { ASK });
        }
    };
    if asks.contains(&path) { Some(ASK) } else { reads.contains(&path).then_some(READ) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{MANAGEMENT, Passage},
        http::testing::Gateway,
    };

    #[test]
    fn what_is_open_is_spelled_so_that_no_two_routers_can_disagree() {
        for path in [VLLM, SGLANG, LLAMA_CPP, VLLM_READS, SGLANG_READS, LLAMA_CPP_READS].concat() {
            assert_eq!(Passage::parse(path), Ok(Passage { reads: false, path: path.to_owned() }), "{path}");
            assert_eq!(path, path.to_ascii_lowercase());
        }
    }

    /// As an engine's router might be talked into reading them.
    fn spellings(name: &str) -> Vec<String> {
        let escaped: String = name.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let upper = name.to_uppercase();
        let around = |before: &str, after: &str| format!("{before}{name}{after}");
        let mut spelled: Vec<String> = [
            "/",
            "//",
            "///",
            "/./",
            "/../",
            "/v1/",
            "/v1/../",
            "/v1/models/../",
            "/v1/models/../../",
            "/%2e/",
            "/v1/%2e%2e/",
            "/v1/.%2e/",
            "/%2f",
            "%2f",
            "/;x/",
            "\\",
            "/v1\\..\\",
            "/%c0%ae%c0%ae/",
            "/v1/models;/",
            "/health/",
            "/v1/chat/completions/../",
            "",
        ]
        .map(|before| around(before, ""))
        .to_vec();
        spelled.extend(
            [
                "/",
                "//",
                "/.",
                "/0",
                ";a=b",
                "%00",
                "%20",
                "%0d%0a",
                "\t",
                ".json",
                "?",
                "?level=1",
                "#v1/models",
            ]
            .map(|after| around("/", after)),
        );
        spelled.extend([format!("/{escaped}"), format!("/{upper}"), format!("/v1/{upper}")]);
        spelled
    }

    #[tokio::test]
    async fn what_steers_an_engine_is_open_on_none_of_any_kind_however_it_is_spelled() {
        let gateway = Gateway::start(|_| {});
        let model = gateway.config.load().models.values().next().map(|model| (**model).clone()).unwrap();
        for kind in [Kind::Vllm, Kind::Sglang, Kind::LlamaCpp, Kind::Custom] {
            let model = Model { kind, ..model.clone() };
            for spelled in MANAGEMENT.iter().flat_map(|name| spellings(name)) {
                assert_eq!(methods(&model, &spelled), None, "{kind:?} {spelled:?}");
            }
        }
    }
}
