use super::*;

/// A claim of this age; a greater `age` is newer.
fn claim(name: &str, age: i64) -> ModelClaim {
    ModelClaim {
        object: ObjectName::new("team-a", name),
        created: Timestamp::from_second(age).ok(),
        name: name.to_owned(),
        aliases: Vec::new(),
        dependencies: Vec::new(),
        sound: true,
    }
}

fn needs(name: &str, dependencies: &[&str]) -> ModelClaim {
    let dependencies = dependencies.iter().map(|name| ObjectName::new("team-a", *name)).collect();
    ModelClaim { dependencies, ..claim(name, 0) }
}

fn reasons(claims: &[ModelClaim]) -> BTreeMap<String, Rejection> {
    let found = find_conflicts(claims);
    let mut backwards = claims.to_vec();
    backwards.reverse();
    assert_eq!(found, find_conflicts(&backwards), "the order decides");
    found.into_iter().map(|(object, refusal)| (object.name, refusal)).collect()
}

#[test]
fn a_name_belongs_to_the_oldest_that_has_it() {
    let named = |object: &str, name: &str, age| ModelClaim { name: name.into(), ..claim(object, age) };
    let same = |object: &str, namespace: &str| ModelClaim {
        object: ObjectName::new(namespace, object),
        ..named(object, "m", 5)
    };
    let found = reasons(&[named("new", "m", 2), named("old", "m", 1), named("other", "n", 3)]);
    let holder = ObjectName::new("team-a", "old");
    assert_eq!(found, [("new".to_owned(), Rejection::DuplicateName { name: "m".into(), holder })].into());
    // Objects from the same second in several namespaces, and one that was never stored.
    let found = find_conflicts(&[
        same("b", "x"),
        same("a", "y"),
        same("b", "a"),
        ModelClaim { created: None, ..same("0", "0") },
    ]);
    let refused: Vec<_> = found.keys().map(ToString::to_string).collect();
    assert_eq!(refused, ["0/0", "x/b", "y/a"]);
    // A mistake in the oldest object does not give its name away.
    let found = reasons(&[named("new", "m", 2), ModelClaim { sound: false, ..named("old", "m", 1) }]);
    assert_eq!(found["new"].reason(), "DuplicateName");
}

#[test]
fn an_alias_is_a_name_like_any_other() {
    let aliased = |object: &str, aliases: &[&str], age| ModelClaim {
        aliases: aliases.iter().map(|alias| (*alias).to_owned()).collect(),
        ..claim(object, age)
    };
    let found = reasons(&[
        aliased("first", &["gpt"], 1),
        aliased("gpt", &[], 2),
        aliased("third", &["x", "gpt"], 3),
        // The other names of a refused object are free.
        aliased("fourth", &["x", "first"], 4),
        aliased("fifth", &["x"], 5),
    ]);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["fourth", "gpt", "third"]);
    let holder = || ObjectName::new("team-a", "first");
    assert_eq!(found["gpt"], Rejection::DuplicateName { name: "gpt".into(), holder: holder() });
    assert_eq!(found["third"], Rejection::DuplicateAlias { alias: "gpt".into(), holder: holder() });
    assert_eq!(found["fourth"], Rejection::DuplicateAlias { alias: "first".into(), holder: holder() });
}

#[test]
fn who_waits_in_a_circle_is_refused_and_so_is_who_waits_for_them() {
    let found = reasons(&[
        needs("a", &["b", "d"]),
        needs("b", &["c"]),
        needs("c", &["a"]),
        needs("d", &["b"]),
        needs("outside", &["d"]),
        needs("self", &["self"]),
        needs("fine", &["base"]),
        needs("base", &[]),
    ]);
    let path = |name: &str| match &found[name] {
        Rejection::Cycle(cycle) => cycle.path().collect::<Vec<_>>().join(" "),
        other => panic!("{name}: {other}"),
    };
    assert_eq!((path("a"), path("b"), path("c")), ("a b c a".into(), "b c a b".into(), "c a b c".into()));
    assert_eq!(path("self"), "self self");
    assert_eq!(found["outside"].reason(), "DependencyRefused");
    assert!(found.contains_key("d") && !found.contains_key("fine") && !found.contains_key("base"));
    assert!(found["a"].to_string().contains("a needs b needs c needs a"), "{}", found["a"]);
}

#[test]
fn a_dependency_that_is_missing_or_refused_is_named() {
    let other = ModelClaim { object: ObjectName::new("team-b", "gone"), ..claim("gone", 0) };
    let bad = ModelClaim { sound: false, ..claim("bad", 0) };
    let found = reasons(&[needs("a", &["gone"]), needs("b", &["a"]), needs("c", &["bad"]), bad, other]);
    let object = |name: &str| ObjectName::new("team-a", name);
    assert_eq!(found["a"], Rejection::DependencyMissing(object("gone")));
    assert_eq!(found["b"], Rejection::DependencyRefused(object("a")));
    assert_eq!(found["c"], Rejection::DependencyRefused(object("bad")));
    assert_eq!(found.len(), 3);
}

#[test]
fn a_chain_of_thousands_is_no_trouble() {
    let name = |n: usize| format!("m{n:05}");
    let chain: Vec<ModelClaim> = (0..5000).map(|n| needs(&name(n), &[&name((n + 1) % 5000)])).collect();
    let found = find_conflicts(&chain);
    assert_eq!(found.len(), 5000);
    assert!(found.values().all(|refusal| refusal.reason() == "DependencyCycle"));
}
