//! Reads spec values and collects errors instead of stopping at the first.
//!
//! A placeholder replaces each invalid value. `finish` discards all placeholders if there was any error.

use rouse::{
    model::{EngineMemory, ModelName},
    units::{Bytes, Millis},
};
use rouse_config::{invalid_name_reason, memory_with_defaults};
use rouse_net::lease::count::MAX_LEASES;

use super::{Rejection, Rejections};
use crate::crd::{
    InferenceModelSpec, Quantity, Span, SpanOrNever,
    inference_model::{VariantSpec, WarmupMode},
};

#[derive(Default)]
pub(super) struct SpecReader {
    rejections: Vec<Rejection>,
    /// Prefix of error messages: names the variant that is being read.
    pub(super) prefix: String,
}

impl SpecReader {
    pub(super) fn reject(&mut self, refusal: Rejection) {
        self.rejections.push(refusal);
    }

    pub(super) fn reject_spec(&mut self, text: impl std::fmt::Display) {
        self.reject(Rejection::Spec(format!("{}{text}", self.prefix)));
    }

    /// Returns the value if no error was recorded. A missing value implies a recorded error.
    pub(super) fn finish<T>(self, value: Option<T>) -> Result<T, Rejections> {
        match value {
            Some(value) if self.rejections.is_empty() => Ok(value),
            _ => Err(Rejections(self.rejections)),
        }
    }

    pub(super) fn names(&mut self, spec: &InferenceModelSpec) -> ModelName {
        let mut seen = Vec::new();
        for name in std::iter::once(&spec.model_name).chain(&spec.aliases) {
            if let Some(why) = invalid_name_reason(name) {
                self.reject(Rejection::Name { name: name.escape_debug().to_string(), why });
            } else if seen.contains(&name) {
                self.reject_spec(format!("the name '{name}' is listed twice: remove one of the two"));
            }
            seen.push(name);
        }
        if spec.max_concurrency.is_some_and(|most| most == 0 || most > MAX_LEASES) {
            self.reject_spec(format!("maxConcurrency must be between 1 and {MAX_LEASES}"));
        }
        ModelName::from(spec.model_name.as_str())
    }

    /// Rejects fields that mode external does not allow.
    pub(super) fn external(&mut self, spec: &InferenceModelSpec) {
        let given = [
            ("template", spec.template.is_some()),
            ("containerImage", spec.container_image.is_some()),
            ("resources", spec.resources.is_some()),
            ("memoryAsleep", spec.memory_asleep.is_some()),
            ("hostMemory", spec.host_memory.is_some()),
            ("stopAfter", spec.stop_after.is_some()),
            ("eviction", spec.eviction.is_some()),
            ("variants", !spec.variants.is_empty()),
            ("saturation", spec.saturation.is_some()),
            ("pinned", spec.pinned),
            ("minReplicas", spec.min_replicas > 0),
            ("warmup", spec.warmup == WarmupMode::Auto),
        ];
        let given: Vec<_> = given.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect();
        if !given.is_empty() {
            self.reject_spec(format!(
                "Rouse does not start, put to sleep, stop or scale the backend of mode external: remove {}",
                given.join(", ")
            ));
        }
    }

    fn quantity(&mut self, field: &str, quantity: Option<&Quantity>) -> Option<Bytes> {
        match quantity?.bytes() {
            Ok(bytes) => Some(bytes),
            Err(error) => {
                self.reject(Rejection::Quantity { field: format!("{}{field}", self.prefix), error });
                None
            }
        }
    }

    /// `kv_cache`: the bytes of an accelerator's memory that hold no weights, if the command sets them.
    pub(super) fn memory(
        &mut self,
        spec: &InferenceModelSpec,
        variant: &VariantSpec,
        can_sleep: bool,
        kv_cache: Option<Bytes>,
    ) -> EngineMemory {
        let awake = variant.memory.as_ref().or(spec.memory.as_ref());
        if awake.is_none() {
            self.reject_spec("memory is missing: set what one engine uses of each accelerator, such as 80Gi");
        }
        let found = self.quantity("memory", awake);
        if found == Some(Bytes::ZERO) {
            self.reject_spec("memory must be more than 0");
        }
        let asleep =
            self.quantity("memoryAsleep", variant.memory_asleep.as_ref().or(spec.memory_asleep.as_ref()));
        let host = self.quantity("hostMemory", variant.host_memory.as_ref().or(spec.host_memory.as_ref()));
        if let (Some(awake), Some(asleep)) = (found, asleep)
            && asleep > awake
        {
            self.reject_spec(format!("memoryAsleep ({asleep}) must be at most memory ({awake})"));
        }
        let awake = found.unwrap_or_default();
        let weights = kv_cache.filter(|_| can_sleep).map(|kv_cache| awake.saturating_sub(kv_cache));
        memory_with_defaults(awake, asleep, host.or(weights), can_sleep)
    }

    /// Rejects a listed variant whose name is no label or whose cost is no cost.
    pub(super) fn variant(&mut self, variant: &VariantSpec) {
        if !is_dns_label(&variant.name) {
            self.reject_spec(
                "the name must be a DNS label: at most 63 lower-case letters, digits and '-', with a letter or a digit \
                 at both ends",
            );
        }
        if !variant.cost.is_finite() || variant.cost < 0.0 {
            self.reject_spec(format!("cost ({}) must be a number from 0", variant.cost));
        }
    }

    /// Returns the least and the largest number of the variant's own engines.
    ///
    /// The model's minReplicas is for all variants together.
    pub(super) fn replicas(&mut self, spec: &InferenceModelSpec, variant: &VariantSpec) -> (u32, u32) {
        let model_min = if spec.variants.is_empty() { spec.min_replicas } else { 0 };
        let min = variant.min_replicas.unwrap_or(model_min);
        let max = variant.max_replicas.unwrap_or(spec.max_replicas);
        if max == 0 {
            self.reject_spec("maxReplicas must be at least 1: to run no engine, delete the object");
        } else if min > max {
            self.reject_spec(format!("minReplicas ({min}) must be at most maxReplicas ({max})"));
        }
        (min, max)
    }

    pub(super) fn accelerators(&mut self, spec: &InferenceModelSpec, variant: &VariantSpec) -> u32 {
        let count = variant.accelerators.unwrap_or(spec.accelerators);
        if count == 0 {
            self.reject_spec("accelerators must be at least 1");
        }
        count
    }

    pub(super) fn positive_span(&mut self, field: &str, span: &Span) -> Millis {
        match span.millis() {
            Ok(Millis::ZERO) => self.reject_spec(format!("{field} must be longer than 0")),
            Ok(span) => return span,
            Err(error) => self.reject(Rejection::Duration { field: field.to_owned(), error }),
        }
        Millis::ZERO
    }

    /// Reads a time span; `None` means never.
    pub(super) fn span_or_never(&mut self, field: &str, span: &SpanOrNever) -> Option<Millis> {
        match span.millis() {
            Ok(span) => span,
            Err(error) => {
                self.reject(Rejection::Duration { field: field.to_owned(), error });
                None
            }
        }
    }
}

pub(super) fn is_dns_label(name: &str) -> bool {
    let is_alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = name.as_bytes();
    bytes.len() <= 63
        && bytes.first().is_some_and(is_alphanumeric)
        && bytes.last().is_some_and(is_alphanumeric)
        && bytes.iter().all(|byte| is_alphanumeric(byte) || *byte == b'-')
}
