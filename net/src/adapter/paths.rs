//! The engine paths that the passthrough opens, by kind of engine: only the paths listed here, byte for byte.
//!
//! An engine serves inference and management on the same listener, and management puts models to sleep, changes weights
//! and runs code. A deny list would miss paths of the engine's next version, and spellings that the engine's router
//! accepts and ours does not. So this is an allow list, compared byte for byte: a path that needs decoding, collapsing
//! or trimming does not match.
//!
//! The lists cover vLLM 0.11 to 0.17, SGLang 0.5 and llama.cpp's server. An engine version that lacks a path answers
//! with its own 404. `/metrics` is left out because it exposes other clients. SGLang's `/health_generate` is left out
//! because it is a GET that generates.

use http::Method;

use super::EngineKind;

/// Path segments of any kind of engine that control it or expose its internals. No configuration opens a path that has
/// one.
pub const MANAGEMENT_SEGMENTS: &[&str] = &[
    "abort",
    "abort_request",
    "abort_requests",
    "add_external_corpus",
    "attach_hicache_storage_backend",
    "begin_weight_update",
    "clear_hicache_storage_backend",
    "close_session",
    "collective_rpc",
    "configure_logging",
    "continue_generation",
    "cors-proxy",
    "destroy_weights_update_group",
    "dump_expert_distribution_record",
    "dumper",
    "finish_weight_update",
    "flush_cache",
    "freeze_gc",
    "get_internal_state",
    "get_server_info",
    "get_weights_by_name",
    "get_world_size",
    "hicache",
    "init_weight_transfer_engine",
    "init_weights_send_group_for_remote_instance",
    "init_weights_update_group",
    "is_paused",
    "is_scaling_elastic_ep",
    "is_sleeping",
    "load",
    "load_lora_adapter",
    "load_lora_adapter_from_tensors",
    "lora-adapters",
    "metrics",
    "open_session",
    "parse_function_call",
    "pause",
    "pause_generation",
    "props",
    "release_memory_occupation",
    "reset_encoder_cache",
    "reset_mm_cache",
    "reset_prefix_cache",
    "resume",
    "resume_memory_occupation",
    "scale_elastic_ep",
    "send_weights_to_remote_instance",
    "server_info",
    "set_internal_state",
    "set_trace_level",
    "shutdown",
    "sleep",
    "slots",
    "slow_down",
    "start_expert_distribution_record",
    "start_profile",
    "start_weight_update",
    "stop_expert_distribution_record",
    "stop_profile",
    "tools",
    "unload_lora_adapter",
    "update_weight_version",
    "update_weights",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
    "wake_up",
    "weights_checker",
];

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

/// Methods of paths that only read.
pub const READ_METHODS: &[Method] = &[Method::GET, Method::HEAD];
/// Methods of paths that make the engine work.
pub const INFERENCE_METHODS: &[Method] = &[Method::POST];

const VLLM_READS: &[&str] = &["/v1/models", "/health", "/ping", "/version"];
const SGLANG_READS: &[&str] = &["/v1/models", "/health", "/model_info", "/get_model_info"];
const LLAMA_CPP_READS: &[&str] = &["/v1/models", "/models", "/health", "/v1/health"];

/// Returns the methods that a path accepts; `None` when the path is closed. Custom engines have no open paths, since
/// their paths are unknown.
#[must_use]
pub fn allowed_methods(kind: EngineKind, path: &str) -> Option<&'static [Method]> {
    let (asks, reads) = match kind {
        EngineKind::Vllm => (VLLM, VLLM_READS),
        EngineKind::Sglang => (SGLANG, SGLANG_READS),
        EngineKind::LlamaCpp => (LLAMA_CPP, LLAMA_CPP_READS),
        EngineKind::Custom => return None,
    };
    if asks.contains(&path) { Some(INFERENCE_METHODS) } else { reads.contains(&path).then_some(READ_METHODS) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two routers may read a path differently when it needs decoding or collapsing.
    #[test]
    fn what_is_open_is_spelled_so_that_no_two_routers_can_disagree() {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"/-_".contains(&byte);
        for path in [VLLM, SGLANG, LLAMA_CPP, VLLM_READS, SGLANG_READS, LLAMA_CPP_READS].concat() {
            assert!(path.bytes().all(plain), "{path}");
            assert!(
                path.starts_with('/') && path.split('/').skip(1).all(|segment| !segment.is_empty()),
                "{path}"
            );
        }
    }

    /// Spellings that an engine's router might accept as `name`.
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

    #[test]
    fn what_steers_an_engine_is_open_on_none_of_any_kind_however_it_is_spelled() {
        for kind in [EngineKind::Vllm, EngineKind::Sglang, EngineKind::LlamaCpp, EngineKind::Custom] {
            for spelled in MANAGEMENT_SEGMENTS.iter().flat_map(|name| spellings(name)) {
                assert_eq!(allowed_methods(kind, &spelled), None, "{kind:?} {spelled:?}");
            }
        }
    }
}
