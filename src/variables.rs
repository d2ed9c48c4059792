//! Replaces `$(NAME)` in a text, as a kubelet does in a container's command.

/// Replaces each `$(NAME)` whose variable exists. `$$` becomes `$`, and all other text stays as it is.
#[must_use]
pub fn expand(text: &str, mut variable: impl FnMut(&str) -> Option<String>) -> String {
    let mut expanded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        expanded.push_str(before);
        if let Some((name, end)) = after.strip_prefix('(').and_then(|inside| inside.split_once(')')) {
            expanded.push_str(&variable(name).unwrap_or_else(|| format!("$({name})")));
            rest = end;
        } else {
            expanded.push('$');
            rest = after.strip_prefix('$').unwrap_or(after);
        }
    }
    expanded.push_str(rest);
    expanded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_replaced_as_a_kubelet_replaces_them() {
        let variable = |name: &str| match name {
            "A" => Some("1".to_owned()),
            "EMPTY" => Some(String::new()),
            "NESTED" => Some("$(A)".to_owned()),
            _ => None,
        };
        for (text, expanded) in [
            ("", ""),
            ("--host=$(A):$(A)", "--host=1:1"),
            ("x$(EMPTY)y", "xy"),
            ("$(NESTED)", "$(A)"),
            ("$(UNKNOWN) $(A", "$(UNKNOWN) $(A"),
            ("$(UNKNOWN $(A)) $(A)", "$(UNKNOWN $(A)) 1"),
            ("$$(A) $$$(A) $", "$(A) $1 $"),
            ("$A ${A}", "$A ${A}"),
        ] {
            assert_eq!(expand(text, variable), expanded, "{text}");
        }
    }
}
