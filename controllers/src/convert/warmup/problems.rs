//! Collects what is wrong with a Warmup.

use crate::{convert::names, image_reference::ImageReference};

/// Everything that is wrong, each as a text with the field and the correction.
#[derive(Default)]
pub(super) struct Problems(Vec<String>);

impl Problems {
    pub(super) fn add(&mut self, problem: impl Into<String>) {
        self.0.push(problem.into());
    }

    /// Returns the value if nothing is wrong. A missing value implies a problem.
    pub(super) fn finish<T>(self, value: Option<T>) -> Result<T, String> {
        value.filter(|_| self.0.is_empty()).ok_or_else(|| self.0.join("; "))
    }

    /// Reads a number that is at least `least`. An absent one is no limit.
    pub(super) fn limit(&mut self, field: &str, value: Option<i64>, least: u32) -> Option<u32> {
        let value = value?;
        let number = u32::try_from(value).ok().filter(|number| *number >= least);
        if number.is_none() {
            self.add(format!("{field} ({value}) must be between {least} and {}", u32::MAX));
        }
        number
    }

    pub(super) fn check_image(&mut self, field: &str, image: &str) {
        if let Err(error) = ImageReference::parse(image) {
            self.add(format!(
                "{field}: '{}' is not the reference of an image: {error}",
                image.escape_debug()
            ));
        }
    }

    pub(super) fn check_object_name(&mut self, field: &str, name: &str) {
        if !names::is_dns_subdomain(name) {
            self.add(format!(
                "{field}: '{}' is not the name of an object: write at most 253 lower-case letters, digits, '-' and \
                 '.', with a letter or a digit at both ends",
                name.escape_debug()
            ));
        }
    }

    pub(super) fn check_label(&mut self, field: &str, key: &str, value: &str) {
        if !names::is_label_key(key) {
            self.add(format!("{field}: '{}' is not the key of a label", key.escape_debug()));
        }
        if !names::is_label_value(value) {
            self.add(format!(
                "{field}: '{}' is not the value of a label: write at most 63 letters, digits, '-', '_' and '.', with \
                 a letter or a digit at both ends",
                value.escape_debug()
            ));
        }
    }
}
