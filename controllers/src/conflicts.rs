//! Finds conflicts between InferenceModels: duplicate names and dependency cycles.
//!
//! A name belongs to the oldest object that has it, even while that object is refused for another reason: a typo in a
//! quantity must not move the right to a name. Among objects created in the same second, the order of their object
//! names decides. An object whose name or alias is taken claims none of its other names.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;

use super::{
    crd::{InferenceModel, ledger::ObjectName},
    rejection::{DependencyCycle, Rejection},
};

/// The names and dependencies that one object claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelClaim {
    pub object: ObjectName,
    pub created: Option<Timestamp>,
    /// Empty if unknown. No object claims the empty name.
    pub name: String,
    pub aliases: Vec<String>,
    pub dependencies: Vec<ObjectName>,
    /// The object by itself is valid.
    pub sound: bool,
}

impl ModelClaim {
    #[must_use]
    pub fn of(model: &InferenceModel, sound: bool) -> Self {
        let object = object_name(model);
        let dependencies = model.spec.dependencies.iter();
        Self {
            created: model.metadata.creation_timestamp.as_ref().map(|time| time.0),
            name: model.spec.model_name.clone(),
            aliases: model.spec.aliases.clone(),
            dependencies: dependencies.map(|name| ObjectName::new(object.namespace.clone(), name)).collect(),
            object,
            sound,
        }
    }
}

/// Returns the object's namespace and name.
#[must_use]
pub fn object_name(model: &InferenceModel) -> ObjectName {
    ObjectName::new(model.namespace().unwrap_or_default(), model.name_any())
}

/// Returns the objects that cannot be served because of others, and why. The order of the claims does not matter.
#[must_use]
pub fn find_conflicts(claims: &[ModelClaim]) -> BTreeMap<ObjectName, Rejection> {
    let mut refused = names(claims);
    let by_object: BTreeMap<&ObjectName, &ModelClaim> =
        claims.iter().map(|claim| (&claim.object, claim)).collect();
    for cycle in cycles(&by_object) {
        let models: Arc<[String]> = cycle.iter().map(|object| object.name.clone()).collect();
        for (first, object) in cycle.iter().enumerate() {
            let cycle = DependencyCycle::new(Arc::clone(&models), first);
            refused.entry((*object).clone()).or_insert(Rejection::Cycle(cycle));
        }
    }
    unserved(&by_object, &mut refused);
    refused
}

fn names(claims: &[ModelClaim]) -> BTreeMap<ObjectName, Rejection> {
    let mut order: Vec<&ModelClaim> = claims.iter().collect();
    // An object without a creation time is not stored yet, so it counts as the newest.
    order.sort_by_key(|claim| (claim.created.is_none(), claim.created, &claim.object));
    let mut holders: BTreeMap<&str, &ObjectName> = BTreeMap::new();
    let mut refused = BTreeMap::new();
    for claim in order {
        let holder_of = |name: &str| holders.get(name).map(|holder| (*holder).clone());
        let name = claim.name.clone();
        let refusal =
            holder_of(&name).map(|holder| Rejection::DuplicateName { name, holder }).or_else(|| {
                claim.aliases.iter().find_map(|alias| {
                    holder_of(alias).map(|holder| Rejection::DuplicateAlias { alias: alias.clone(), holder })
                })
            });
        if let Some(refusal) = refusal {
            refused.insert(claim.object.clone(), refusal);
            continue;
        }
        let names = std::iter::once(&claim.name).chain(&claim.aliases).filter(|name| !name.is_empty());
        holders.extend(names.map(|name| (name.as_str(), &claim.object)));
    }
    refused
}

/// Finds dependency cycles, such that every cycle shares at least one object with a returned cycle.
///
/// The other members of a cycle depend on that object, and `unserved` refuses them for that reason.
fn cycles<'a>(claims: &BTreeMap<&'a ObjectName, &'a ModelClaim>) -> Vec<Vec<&'a ObjectName>> {
    let mut cycles: Vec<Vec<&ObjectName>> = Vec::new();
    let mut done = BTreeSet::new();
    for start in claims.keys() {
        if !done.contains(*start) {
            walk(claims, start, &mut done, &mut cycles);
        }
    }
    cycles
}

/// Searches depth first with an explicit stack. All objects that it reaches are done then.
///
/// A chain of thousands could overflow the thread's stack.
fn walk<'a>(
    claims: &BTreeMap<&'a ObjectName, &'a ModelClaim>,
    start: &'a ObjectName,
    done: &mut BTreeSet<&'a ObjectName>,
    cycles: &mut Vec<Vec<&'a ObjectName>>,
) {
    let mut path: Vec<(&ObjectName, usize)> = vec![(start, 0)];
    let mut positions: BTreeMap<&ObjectName, usize> = BTreeMap::from([(start, 0)]);
    while let Some((object, next)) = path.last_mut() {
        let claim = claims.get(*object);
        let Some(dependency) = claim.and_then(|claim| claim.dependencies.get(*next)) else {
            positions.remove(*object);
            done.insert(*object);
            path.pop();
            continue;
        };
        *next += 1;
        if let Some(from) = positions.get(dependency) {
            cycles.push(path.iter().skip(*from).map(|(object, _)| *object).collect());
        } else if !done.contains(dependency) && claims.contains_key(dependency) {
            positions.insert(dependency, path.len());
            path.push((dependency, 0));
        }
    }
}

/// Refuses objects that depend on a missing or unserved object, and all their dependents.
fn unserved(claims: &BTreeMap<&ObjectName, &ModelClaim>, refused: &mut BTreeMap<ObjectName, Rejection>) {
    let mut dependents: BTreeMap<&ObjectName, Vec<&ObjectName>> = BTreeMap::new();
    let mut bad: Vec<&ObjectName> = Vec::new();
    for (object, claim) in claims {
        for dependency in &claim.dependencies {
            dependents.entry(dependency).or_default().push(object);
            if !claims.contains_key(dependency) && !refused.contains_key(*object) {
                refused.insert((*object).clone(), Rejection::DependencyMissing(dependency.clone()));
            }
        }
    }
    bad.extend(
        claims
            .iter()
            .filter(|(object, claim)| !claim.sound || refused.contains_key(**object))
            .map(|(o, _)| *o),
    );
    while let Some(object) = bad.pop() {
        for dependent in dependents.get(object).into_iter().flatten() {
            if !refused.contains_key(*dependent) {
                refused.insert((*dependent).clone(), Rejection::DependencyRefused(object.clone()));
                bad.push(dependent);
            }
        }
    }
}

#[cfg(test)]
mod tests;
