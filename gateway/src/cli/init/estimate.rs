//! Estimates a model's memory from the size of its weights and the numbers of its configuration.
//!
//! The estimates are meant to be rather too large: an engine that needs more than is reserved fails, one that needs
//! less leaves room unused until it is measured.

use rouse::units::{Bytes, pluralize};

/// Contexts that are tried, in tokens. The first is enough for most chats; less makes the KV cache smaller.
const CONTEXTS: [u64; 3] = [8192, 4096, 2048];
/// Requests whose whole context fits into vLLM's and SGLang's cache at once.
const FULL_REQUESTS: u64 = 2;
/// What vLLM and SGLang need for activations and graphs besides weights and cache.
const FRAMEWORK: Bytes = Bytes::gib(2);
/// The smallest cache for such an engine: less makes it slow.
const MIN_CACHE: Bytes = Bytes::gib(1);
/// What a llama.cpp process needs for buffers besides weights, cache and the results.
const LLAMA_CPP: Bytes = Bytes::mib(384);
/// What Python and its libraries add to llama.cpp.
const PYTHON: Bytes = Bytes::mib(256);
/// Tokens that llama.cpp computes at once. It has one result for each word of the vocabulary, of 4 bytes.
const BATCH: u64 = 512;
/// Vocabulary of a model whose file does not have its size: that of most models of 2025.
const USUAL_VOCABULARY: u64 = 152_000;
/// Estimates are multiples of this: more digits would feign precision.
const STEP: u64 = 64 << 20;

/// The numbers of a model that its memory follows from.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModelSize {
    pub(super) weights: u64,
    /// Bytes of the KV cache for each token.
    pub(super) kv_bytes: Option<u64>,
    pub(super) context: Option<u64>,
    pub(super) vocabulary: Option<u64>,
}

/// The engine's own share of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EngineOverhead {
    /// vLLM and SGLang.
    Framework,
    LlamaServer,
    LlamaCppPython,
}

/// How much memory an engine is proposed, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MemoryEstimate {
    /// On each of its accelerators.
    pub(super) awake: Bytes,
    pub(super) accelerators: u32,
    /// Tokens of context.
    pub(super) context: u64,
    /// The parts of the sum.
    pub(super) why: String,
}

/// Estimates the memory of an engine that fits; the error says what it needs.
///
/// `capacity` is what one accelerator can give, and `most` how many of them one engine may have.
pub(super) fn estimate(
    size: &ModelSize,
    overhead: EngineOverhead,
    capacity: Bytes,
    most: u32,
) -> Result<MemoryEstimate, String> {
    let trained = size.context.unwrap_or(u64::MAX);
    let contexts = CONTEXTS.map(|context| context.min(trained));
    // Powers of two divide the heads of every model.
    let counts = (0..u32::BITS).map(|power| 1_u32 << power).take_while(|count| *count <= most.max(1));
    let wishes =
        counts.flat_map(|count| contexts.map(|context| with_context(size, overhead, context, count)));
    let mut smallest = None;
    for wish in wishes {
        if wish.awake <= capacity {
            return Ok(wish);
        }
        smallest = Some(wish);
    }
    let need = smallest.map_or(Bytes::ZERO, |wish: MemoryEstimate| wish.awake);
    Err(format!(
        "it needs about {need} on {}, and at most {capacity} can be reserved there",
        if most > 1 {
            format!("each of {}", pluralize(most, "accelerator"))
        } else {
            "one accelerator".to_owned()
        }
    ))
}

fn with_context(
    size: &ModelSize,
    overhead: EngineOverhead,
    context: u64,
    accelerators: u32,
) -> MemoryEstimate {
    let weights = Bytes(size.weights);
    // Without numbers: an eighth of the weights is what models with grouped heads need for such contexts.
    let of_request = size.kv_bytes.map_or(size.weights / 8, |bytes| bytes.saturating_mul(context));
    let (cache, buffers) = match overhead {
        EngineOverhead::Framework => {
            let cache = Bytes(of_request.saturating_mul(FULL_REQUESTS)).max(MIN_CACHE);
            (cache, FRAMEWORK + Bytes(size.weights / 32))
        }
        EngineOverhead::LlamaServer | EngineOverhead::LlamaCppPython => {
            let results = size.vocabulary.unwrap_or(USUAL_VOCABULARY).saturating_mul(BATCH * 4);
            let python = if overhead == EngineOverhead::LlamaCppPython { PYTHON } else { Bytes::ZERO };
            // A vocabulary that a file only claims must not count without bound.
            let results = Bytes(results).min(Bytes::gib(2));
            (Bytes(of_request), LLAMA_CPP + python + results + Bytes(size.weights / 50))
        }
    };
    // Each accelerator has its part of weights and cache, and the buffers as a whole.
    let count = u64::from(accelerators.max(1));
    let part = Bytes((weights + cache).0.div_ceil(count));
    MemoryEstimate {
        awake: round_up(part + buffers),
        accelerators,
        context,
        why: format!(
            "weights {}, KV cache {} for a context of {context}, buffers {}{}",
            round_up(weights),
            round_up(cache),
            round_up(buffers),
            if count > 1 { format!(" on each of {count} accelerators") } else { String::new() }
        ),
    }
}

/// Rounds up to a multiple of [`STEP`].
pub(super) const fn round_up(size: Bytes) -> Bytes {
    Bytes(size.0.div_ceil(STEP).saturating_mul(STEP))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model of 8 billion parameters with 16 bits, as Qwen3-8B.
    const LARGE: ModelSize = ModelSize {
        weights: 16_381_470_720,
        kv_bytes: Some(36 * 8 * 128 * 2 * 2),
        context: Some(40_960),
        vocabulary: Some(151_936),
    };
    const TINY: ModelSize =
        ModelSize { weights: 600_000, kv_bytes: Some(1024), context: Some(2048), vocabulary: Some(311) };

    #[test]
    fn a_model_gets_the_first_context_that_fits() {
        let of = |gib| estimate(&LARGE, EngineOverhead::Framework, Bytes::gib(gib), 1);
        let roomy = of(79).unwrap();
        assert_eq!((roomy.context, roomy.accelerators), (8192, 1));
        assert!((Bytes::gib(19)..Bytes::gib(22)).contains(&roomy.awake), "{}", roomy.awake);
        let tight = of(19).unwrap();
        assert!(tight.context < 8192 && tight.awake <= Bytes::gib(19), "{tight:?}");
        let error = of(11).unwrap_err();
        assert!(error.contains("one accelerator, and at most 11Gi"), "{error}");
    }

    #[test]
    fn a_model_too_large_for_one_accelerator_is_split() {
        let split = estimate(&LARGE, EngineOverhead::Framework, Bytes::gib(15), 2).unwrap();
        assert_eq!((split.accelerators, split.context), (2, 8192));
        assert!(split.why.ends_with("on each of 2 accelerators"), "{}", split.why);
    }

    #[test]
    fn no_context_is_longer_than_the_model_was_trained_for() {
        let small = estimate(&TINY, EngineOverhead::LlamaCppPython, Bytes::gib(4), 1).unwrap();
        assert_eq!(small.context, 2048);
        assert!((Bytes::mib(640)..Bytes::gib(1)).contains(&small.awake), "{}", small.awake);
        assert_eq!(small.awake.0 % STEP, 0);
    }

    #[test]
    fn numbers_of_a_file_never_overflow() {
        let absurd = ModelSize {
            weights: u64::MAX,
            kv_bytes: Some(u64::MAX),
            context: Some(u64::MAX),
            vocabulary: Some(u64::MAX),
        };
        for overhead in [EngineOverhead::Framework, EngineOverhead::LlamaServer] {
            assert!(estimate(&absurd, overhead, Bytes::gib(80), 8).is_err());
        }
    }
}
