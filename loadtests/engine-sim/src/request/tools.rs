//! Tools in the three APIs' forms, and the tools that a request wants called.

use serde_json::Value;

#[derive(Debug)]
pub(crate) struct ToolDefinition {
    pub(crate) name: String,
    /// The JSON schema of its arguments.
    pub(crate) schema: Value,
}

/// Keeps tools with a name. The other tools of an API run on its servers, not at its clients.
pub(super) fn parse(tools: &Value) -> Vec<ToolDefinition> {
    let tool = |tool: &Value| {
        let function = tool.get("function").unwrap_or(tool);
        let name = function.get("name")?.as_str()?.to_owned();
        let schema = function.get("parameters").or_else(|| function.get("input_schema"));
        Some(ToolDefinition { name, schema: schema.cloned().unwrap_or_default() })
    };
    tools.as_array().into_iter().flatten().filter_map(tool).collect()
}

/// Selects the tools to call: a choice by name leaves one, `none` leaves none, and without parallel calls only the
/// first is called.
pub(super) fn select(
    mut tools: Vec<ToolDefinition>,
    choice: Option<&Value>,
    parallel: Option<bool>,
) -> Vec<ToolDefinition> {
    let field = |name: &str| choice.and_then(|choice| choice.get(name));
    let kind = choice.and_then(Value::as_str).or_else(|| field("type").and_then(Value::as_str));
    if kind == Some("none") {
        return Vec::new();
    }
    let named = field("function").and_then(|function| function.get("name")).or_else(|| field("name"));
    if let Some(named) = named.and_then(Value::as_str) {
        tools.retain(|tool| tool.name == named);
    }
    let alone = field("disable_parallel_tool_use").and_then(Value::as_bool) == Some(true);
    if alone || parallel == Some(false) {
        tools.truncate(1);
    }
    tools
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tools_are_chosen_by_name_by_kind_and_one_at_a_time() {
        let tools = json!([
            {"type": "function", "function": {"name": "a"}}, {"type": "function", "name": "b"},
            {"name": "c", "input_schema": {}}, {"type": "web_search"},
        ]);
        let names = |choice: Value, parallel| -> String {
            select(parse(&tools), Some(&choice), parallel).into_iter().map(|tool| tool.name).collect()
        };
        assert_eq!(names(json!("auto"), None), "abc");
        assert_eq!(names(json!("required"), Some(false)), "a");
        assert_eq!(names(json!({"type": "auto", "disable_parallel_tool_use": true}), None), "a");
        assert_eq!(names(json!({"type": "function", "function": {"name": "b"}}), None), "b");
        assert_eq!(names(json!({"type": "tool", "name": "c"}), None), "c");
        assert_eq!(names(json!("none"), None) + &names(json!({"type": "none"}), None), "");
    }
}
