//! Refusals without the names of models that their reader may not use.
//!
//! The decisions know models and no keys, so what stands in the way is told by name. Who may not use a model must not
//! learn from a refusal that it exists; that something holds the memory, how much and for how long is still said.
//!
//! Which names stand in a refusal, it says itself. To look for those that are configured would miss what came into the
//! configuration, or left it, while the request waited.

use rouse::{
    fault::{Blocking, Fault, Wait},
    model::ModelName,
};

use super::Key;

const ANOTHER: &str = "another model";

/// Takes the names out of a refusal that may not be told to this key.
pub(crate) fn discreet(mut fault: Fault, key: &Key) -> Fault {
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
    let hidden = hide(wait, key);
    if let Fault::QueueFull { message, .. } = &mut fault {
        *message = without(message, &hidden);
    }
    fault
}

/// Gives what was hidden.
fn hide(wait: &mut Wait, key: &Key) -> Vec<ModelName> {
    let named = std::mem::take(&mut wait.named);
    let models = wait.holders.iter().map(|holder| holder.model.clone()).chain(named.iter().cloned());
    let hidden: Vec<ModelName> = models.filter(|model| !key.may_use(model)).collect();
    wait.named = named.into_iter().filter(|model| !hidden.contains(model)).collect();
    for Blocking { model, .. } in &mut wait.holders {
        if !key.may_use(model) {
            *model = ANOTHER.into();
        }
    }
    wait.waited_for = without(&wait.waited_for, &hidden);
    hidden
}

/// The text with each of the names, where it stands as a word, replaced.
fn without(text: &str, names: &[ModelName]) -> String {
    let mut said = String::with_capacity(text.len());
    let mut rest = text;
    let mut before = None;
    while let Some(next) = rest.chars().next() {
        let longest = names
            .iter()
            .map(ModelName::as_str)
            .filter(|name| !name.is_empty() && !is_part(before, None))
            .filter_map(|name| Some((name.len(), rest.strip_prefix(name)?)))
            .filter(|(_, after)| {
                let mut after = after.chars();
                !is_part(after.next(), after.next())
            })
            .max_by_key(|(length, _)| *length);
        if let Some((_, after)) = longest {
            said.push_str(ANOTHER);
            (rest, before) = (after, None);
        } else {
            said.push(next);
            before = Some(next);
            rest = rest.strip_prefix(next).unwrap_or_default();
        }
    }
    said
}

/// Whether a name goes on with this character. A full stop may also end a sentence: then nothing of a name follows.
fn is_part(c: Option<char>, then: Option<char>) -> bool {
    match c {
        None => false,
        Some('.' | ':') => then.is_some_and(char::is_alphanumeric),
        Some(c) => c.is_alphanumeric() || matches!(c, '-' | '_' | '/' | '@' | '+'),
    }
}

#[cfg(test)]
mod tests {
    use rouse::units::{Bytes, Millis};

    use super::*;
    use crate::config::Models;

    fn holder(model: &str) -> Blocking {
        Blocking { model: model.into(), memory: Bytes::gib(1), idle_for: Millis(1), leases: 1, pinned: false }
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
            assert_eq!(without(text, &names), said);
        }
    }

    #[test]
    fn holders_and_texts_name_only_what_the_key_may_use() {
        let wait = Wait {
            waited_for: "gpu-0: held by secret, mine; after gone#1".into(),
            named: vec!["mine".into(), "gone".into()],
            holders: vec![holder("secret"), holder("mine")],
            ..Wait::default()
        };
        let fault = Fault::QueueFull { message: "too many wait for secret".into(), wait };
        let limited = Key::for_tests("k", Models::Some(["mine".into()].into()));
        let Fault::QueueFull { message, wait } = discreet(fault.clone(), &limited) else {
            panic!("another fault");
        };
        assert_eq!(message, "too many wait for another model");
        assert_eq!(wait.waited_for, "gpu-0: held by another model, mine; after another model#1");
        assert_eq!(wait.named, ["mine".into()]);
        assert_eq!(wait.holders.iter().map(|h| h.model.as_str()).collect::<Vec<_>>(), [ANOTHER, "mine"]);
        let all = Key::for_tests("k", Models::All);
        assert_eq!(discreet(fault.clone(), &all), fault);
    }
}
