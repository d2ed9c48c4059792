//! Names providers after node, accelerators and engine, so that the API server refuses a duplicate.

use aws_lc_rs::digest;
use rouse::pairing::ids::{PairingEngineId, ProviderMode};

use super::ProviderPlacement;

/// Maximum length of a Pod name that can also be its host name.
const MAX_NAME_CHARS: usize = 63;

/// Returns `NODE-MASK-dual`, where MASK has a bit for each accelerator's index, in hexadecimal.
///
/// The name of an engine that sleeps also has eight digits of its fingerprint, since several such engines may share
/// accelerators.
#[must_use]
pub fn name(placement: &ProviderPlacement<'_>, engine: &PairingEngineId) -> String {
    let node: String =
        placement.node.as_str().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let mask = placement.numbers.map_or_else(|| hashed(&by_uuid(placement), 8), mask);
    let fingerprint = match engine.mode {
        ProviderMode::Sleep => format!("-{:08x}", engine.fingerprint.0 >> 32),
        ProviderMode::Plain | ProviderMode::Launcher => String::new(),
    };
    let rest = format!("-{mask}{fingerprint}-dual");
    let whole = format!("{}{rest}", node.to_ascii_lowercase());
    if whole.len() <= MAX_NAME_CHARS {
        return whole;
    }
    let hash = hashed(&whole, 8);
    let max_prefix = MAX_NAME_CHARS.saturating_sub(fingerprint.len() + "-dual".len() + hash.len() + 1);
    let cut: String = whole.chars().take(max_prefix).collect();
    format!("{}-{hash}{fingerprint}-dual", cut.trim_end_matches('-'))
}

fn by_uuid(placement: &ProviderPlacement<'_>) -> String {
    placement.accelerators.iter().map(|id| format!("{id},")).collect()
}

/// Sets a bit for each number; renders the mask in hexadecimal of any length.
fn mask(numbers: &[u32]) -> String {
    let highest = numbers.iter().copied().max().unwrap_or_default();
    let digits = (0..=highest / 4).rev().map(|digit| {
        let bits = numbers.iter().filter(|number| **number / 4 == digit);
        let digit = bits.fold(0, |sum, number| sum | 1 << (number % 4));
        char::from_digit(digit, 16).unwrap_or('0')
    });
    digits.collect()
}

fn hashed(text: &str, digits: usize) -> String {
    let hash = digest::digest(&digest::SHA256, text.as_bytes());
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>().chars().take(digits).collect()
}

#[cfg(test)]
mod tests {
    use rouse::pairing::ids::{EngineFingerprint, NodeName};

    use super::*;

    fn named(node: &str, numbers: Option<&[u32]>, mode: ProviderMode) -> String {
        let node = NodeName::from(node);
        let accelerators = ["GPU-1".into()];
        let engine = PairingEngineId {
            mode,
            accelerators: accelerators.clone().into(),
            fingerprint: EngineFingerprint(0x0123_4567_89ab_cdef),
        };
        name(&ProviderPlacement { node: &node, accelerators: &accelerators, numbers }, &engine)
    }

    #[test]
    fn it_is_made_of_node_mask_and_fingerprint() {
        assert_eq!(
            named("somenode", Some(&[3]), ProviderMode::Plain),
            "somenode-8-dual",
            "as in the public project"
        );
        assert_eq!(named("somenode", Some(&[0, 1, 7]), ProviderMode::Sleep), "somenode-83-01234567-dual");
        assert_eq!(named("n", Some(&[64]), ProviderMode::Plain), "n-10000000000000000-dual");
        let unnumbered = named("Node.a", None, ProviderMode::Plain);
        assert!(unnumbered.starts_with("node-a-") && unnumbered.ends_with("-dual"), "{unnumbered}");
    }

    #[test]
    fn a_long_one_is_cut_and_stays_its_own() {
        let node = |last: char| format!("{}{last}", "n".repeat(80));
        let (a, b) = (
            named(&node('a'), Some(&[0]), ProviderMode::Sleep),
            named(&node('b'), Some(&[0]), ProviderMode::Sleep),
        );
        assert!(a.len() <= MAX_NAME_CHARS && a.ends_with("-01234567-dual"), "{a}");
        assert_ne!(a, b);
    }
}
