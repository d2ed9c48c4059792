//! Removes the names of models from refusals for keys that may not use them.
//!
//! The fleet's decisions know models and no keys, so they name the models that block a request. A client without access
//! to a model must not learn from a refusal that the model exists. The refusal still reports that memory is held, how
//! much and for how long.
//!
//! The refusal itself lists the names that it contains. Searching for the configured names instead would miss models
//! that entered or left the configuration while the request waited.

use rouse::{
    fault::{BlockingModel, Fault, WaitDetails},
    model::ModelName,
};

use super::ApiKey;

const REDACTED_NAME: &str = "another model";

/// Replaces the names in a refusal that this key may not see.
pub(crate) fn redact(mut fault: Fault, key: &ApiKey) -> Fault {
    if key.may_use_all() {
        return fault;
    }
    let wait = match &mut fault {
        Fault::InsufficientMemory(shortage) => &mut shortage.wait,
        Fault::QueueFull { wait, .. }
        | Fault::ModelNotReady { wait, .. }
        | Fault::EngineFailed { wait: Some(wait), .. } => wait,
        _ => return fault,
    };
    let hidden = redact_wait(wait, key);
    if let Fault::QueueFull { message, .. } = &mut fault {
        *message = replace_names(message, &hidden);
    }
    fault
}

/// Redacts a wait and returns the hidden names.
fn redact_wait(wait: &mut WaitDetails, key: &ApiKey) -> Vec<ModelName> {
    let named = std::mem::take(&mut wait.named_models);
    let models = wait.holders.iter().map(|holder| holder.model.clone()).chain(named.iter().cloned());
    let hidden: Vec<ModelName> = models.filter(|model| !key.may_use(model)).collect();
    wait.named_models = named.into_iter().filter(|model| !hidden.contains(model)).collect();
    for BlockingModel { model, .. } in &mut wait.holders {
        if !key.may_use(model) {
            *model = REDACTED_NAME.into();
        }
    }
    wait.waited_for = replace_names(&wait.waited_for, &hidden);
    hidden
}

/// Replaces each of the names where it stands as a word.
fn replace_names(text: &str, names: &[ModelName]) -> String {
    let mut redacted = String::with_capacity(text.len());
    let mut rest = text;
    let mut before = None;
    while let Some(next) = rest.chars().next() {
        let longest = names
            .iter()
            .map(ModelName::as_str)
            .filter(|name| !name.is_empty() && !continues_name(before, None))
            .filter_map(|name| Some((name.len(), rest.strip_prefix(name)?)))
            .filter(|(_, after)| {
                let mut after = after.chars();
                !continues_name(after.next(), after.next())
            })
            .max_by_key(|(length, _)| *length);
        if let Some((_, after)) = longest {
            redacted.push_str(REDACTED_NAME);
            (rest, before) = (after, None);
        } else {
            redacted.push(next);
            before = Some(next);
            rest = rest.strip_prefix(next).unwrap_or_default();
        }
    }
    redacted
}

/// Whether a name continues with this character. A full stop or colon ends a name unless a letter or digit follows.
fn continues_name(c: Option<char>, next: Option<char>) -> bool {
    match c {
        None => false,
        Some('.' | ':') => next.is_some_and(char::is_alphanumeric),
        Some(c) => c.is_alphanumeric() || matches!(c, '-' | '_' | '/' | '@' | '+'),
    }
}

#[cfg(test)]
mod tests {
    use rouse::units::{Bytes, Millis};

    use super::*;
    use rouse_config::ModelAccess;

    fn holder(model: &str) -> BlockingModel {
        BlockingModel {
            model: model.into(),
            memory: Bytes::gib(1),
            idle_for: Millis(1),
            leases: 1,
            pinned: false,
        }
    }

    #[test]
    fn names_are_hidden_where_they_are_words_and_nowhere_else() {
        let names = ["a", "llama-3", "org/secret"].map(ModelName::from);
        for (text, said) in [
            ("held by llama-3", "held by another model"),
            ("held by llama-3.1-8b, llama-3.", "held by llama-3.1-8b, another model."),
            (
                "waits for a, org/secret and org/secret-2",
                "waits for another model, another model and org/secret-2",
            ),
            ("a launch at last", "another model launch at last"),
            ("llama-3#0 drains", "another model#0 drains"),
        ] {
            assert_eq!(replace_names(text, &names), said);
        }
    }

    #[test]
    fn holders_and_texts_name_only_what_the_key_may_use() {
        let wait = WaitDetails {
            waited_for: "gpu-0: held by secret, mine; after gone#1".into(),
            named_models: ["mine".into(), "gone".into()].into(),
            holders: vec![holder("secret"), holder("mine")],
            ..WaitDetails::default()
        };
        let fault = Fault::QueueFull { message: "too many wait for secret".into(), wait };
        let limited = ApiKey::for_tests("k", ModelAccess::Only(["mine".into()].into()));
        let Fault::QueueFull { message, wait } = redact(fault.clone(), &limited) else {
            panic!("another fault");
        };
        assert_eq!(message, "too many wait for another model");
        assert_eq!(wait.waited_for, "gpu-0: held by another model, mine; after another model#1");
        assert_eq!(*wait.named_models, ["mine".into()]);
        assert_eq!(
            wait.holders.iter().map(|h| h.model.as_str()).collect::<Vec<_>>(),
            [REDACTED_NAME, "mine"]
        );
        let all = ApiKey::for_tests("k", ModelAccess::All);
        assert_eq!(redact(fault.clone(), &all), fault);
    }
}
