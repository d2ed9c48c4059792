//! What the inference API answers, byte for byte where it matters.
