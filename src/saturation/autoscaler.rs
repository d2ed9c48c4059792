//! The autoscaler of one model: what the controller and the simulator call.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Decision, LastDecision, ModelAnalysis, ModelLoad, Profile, RefusalCause, ReplicaMetrics, Role,
    SaturationPolicy, StepLimits, Target, TargetReason, TokenAnalysis, Transition, VariantState, analyze,
    limiter, targets,
    token_capacity::{TokenHistory, TokenLoad},
    zero::{self, ZeroDemand},
};
use crate::{
    model::VariantName,
    units::{Millis, Tick},
};

/// Pause between two steps down. The load of the replica that left takes about as long to show in the others.
const PAUSE_AFTER_STEP_DOWN: Millis = Millis::secs(60);
/// The longest pause between two tries of a variant that memory refuses, in first pauses.
///
/// Released memory ends a refusal at once, so a try without any is for what the fleet cannot see.
const MAX_REFUSAL_PAUSES: u64 = 16;

/// Decides how many replicas each variant of one model runs, and remembers what it decided.
///
/// Pure: the same loads at the same moments give the same decisions.
#[derive(Clone, Debug, Default)]
pub struct Autoscaler {
    policy: SaturationPolicy,
    last: Option<LastDecision>,
    /// Since when a step down has been safe without a break, by role.
    safe_since: BTreeMap<Role, Tick>,
    /// When a step down was last decided, and from how many replicas, by role.
    last_step_down: BTreeMap<Role, (Tick, u32)>,
    /// When a refused variant may be tried again, and the pause that ends then.
    retry_at: BTreeMap<VariantName, (Tick, Millis)>,
    history: TokenHistory,
}

impl Autoscaler {
    #[must_use]
    pub fn new(policy: SaturationPolicy) -> Self {
        Self { policy, ..Self::default() }
    }

    /// Replaces the policy. What was decided stays.
    pub const fn set_policy(&mut self, policy: SaturationPolicy) {
        self.policy = policy;
    }

    /// Returns the last decision, for the status that survives a restart.
    #[must_use]
    pub const fn last(&self) -> Option<&LastDecision> {
        self.last.as_ref()
    }

    /// Takes the last decision of an earlier process over. The time for a step down begins anew.
    pub fn restore(&mut self, last: LastDecision) {
        self.last = Some(last);
    }

    /// Decides the number of replicas of each variant.
    ///
    /// A variant without a reason to change keeps its last decision. Nothing is lowered because something is unknown.
    pub fn decide(&mut self, input: &ModelLoad, now: Tick) -> Decision {
        let states = self.remembered_states(input);
        let limits = StepLimits {
            max_step: self.policy.max_step,
            refused: self.refused(input, now),
            pool: input.accelerators.clone(),
            scale_down_after: None,
        };
        let mut decision = Decision {
            decided_at: now,
            thresholds: input.thresholds,
            accelerators_left: input.accelerators.clone(),
            ..Decision::default()
        };
        if let Err(error) = input.thresholds.validate() {
            let held = |state| Target::held(state, TargetReason::bad_thresholds(&error));
            decision.targets = states.iter().map(held).collect();
            return decision;
        }
        let mut model = DecisionContext { input, states: &states, limits, is_split: is_split(input) };
        for role in model.roles() {
            self.decide_role(&mut model, role, now, &mut decision);
        }
        allocate(&states, &mut decision);
        self.remember(&decision);
        decision
    }

    /// The states by name, with this autoscaler's last decision.
    fn remembered_states(&self, input: &ModelLoad) -> Vec<VariantState> {
        let last = self.last.as_ref();
        let remembered = |state: &VariantState| {
            let decided = last.and_then(|last| last.replicas.get(&state.variant)).copied();
            let desired = decided.or(state.desired);
            // A refused replica will not come, and waiting for it would keep the model in transition for ever.
            let is_refused = input.refused.contains_key(&state.variant);
            let desired = desired.filter(|desired| !is_refused || *desired <= state.current);
            VariantState { desired, ..state.clone() }
        };
        let mut states: Vec<VariantState> = input.states.iter().map(remembered).collect();
        states.sort_by(|state, other| state.variant.cmp(&other.variant));
        states
    }

    /// Returns the refused variants that may not be tried again yet. One that may is tried once for each pause.
    ///
    /// A refusal by memory doubles the pause with each try, since each changes targets and statuses twice. The fleet
    /// itself spaces the starts that fail.
    fn refused(&mut self, input: &ModelLoad, now: Tick) -> BTreeMap<VariantName, RefusalCause> {
        self.retry_at.retain(|variant, _| input.refused.contains_key(variant));
        let first = self.policy.refusal_retry;
        let longest = Millis(first.0.saturating_mul(MAX_REFUSAL_PAUSES));
        let mut refused = BTreeMap::new();
        for (variant, cause) in &input.refused {
            let (retry_at, pause) = self.retry_at.entry(variant.clone()).or_insert((now + first, first));
            if now >= *retry_at {
                *pause = match cause {
                    RefusalCause::Memory => (*pause + *pause).min(longest),
                    RefusalCause::StartFailed => first,
                };
                *retry_at = now + *pause;
            } else {
                refused.insert(variant.clone(), *cause);
            }
        }
        refused
    }

    fn decide_role(
        &mut self,
        model: &mut DecisionContext<'_>,
        role: Role,
        now: Tick,
        decision: &mut Decision,
    ) {
        let profile = self.policy.profile;
        let states = model.states_of(role);
        let replicas = model.replicas_of(profile, role, &states);
        let input = model.input;
        let (parked, lengths, thresholds) = (input.parked, input.lengths, &input.thresholds);

        let load = TokenLoad { role, replicas: &replicas, states: &states, lengths, parked };
        let tokens = TokenAnalysis::new(&load, thresholds, &mut self.history);
        let own = with_unknown(profile, &replicas, &states);
        decision.saturated |= analyze(profile, &own, thresholds).is_saturated();
        let mut analysis = analyze(profile, &with_parked(profile, role, own, parked), thresholds);
        let by_tokens = tokens.as_ref().and_then(TokenAnalysis::shortage);
        if let Some(shortage) = by_tokens.filter(|_| analysis.scale_up) {
            analysis.shortage = shortage;
        }
        let current = states.iter().fold(0_u32, |sum, state| sum.saturating_add(state.current));
        self.time_scale_down(model, role, &analysis, current, now);

        let mut role_targets = targets(profile, &analysis, &states, &model.limits);
        if role_targets.iter().any(|target| matches!(target.reason, TargetReason::ScaleDown { .. })) {
            self.last_step_down.insert(role, (now, current));
        }
        let by_name: BTreeMap<&VariantName, &VariantState> =
            states.iter().map(|state| (&state.variant, state)).collect();
        let transition = Transition::find(profile, &analysis, &by_name, &model.limits.refused);
        // The profiles that follow the variants that report say nothing about the others.
        for state in &states {
            if role_targets.iter().all(|target| target.variant != state.variant) {
                role_targets.push(Target::new(state, state.current, TargetReason::NoMetrics));
            }
        }
        role_targets.sort_by(|target, other| target.variant.cmp(&other.variant));
        let is_external = apply_external(input, &states, &mut role_targets);
        if !is_external || parked > 0 && role_targets.iter().all(|target| target.replicas == 0) {
            zero::wake(&mut role_targets, &states, parked, &model.limits);
        }
        let demand = ZeroDemand { parked, idle_for: input.idle_for };
        self.policy.zero.apply(&mut role_targets, &states, model.states, &demand);

        decision.transition = decision.transition.take().or(transition);
        decision.targets.append(&mut role_targets);
        decision.analyses.insert(role, analysis);
        decision.tokens.extend(tokens.map(|tokens| (role, tokens)));
    }

    /// Notes since when a step down has been safe, and sets how long it still has to wait.
    ///
    /// `current`: replicas of the role. The pause begins only once a step down has been carried out: another autoscaler
    /// may take its time for it.
    fn time_scale_down(
        &mut self,
        model: &mut DecisionContext<'_>,
        role: Role,
        analysis: &ModelAnalysis,
        current: u32,
        now: Tick,
    ) {
        model.limits.scale_down_after = None;
        if self.policy.profile != Profile::Rouse {
            return;
        }
        if !analysis.scale_down_safe {
            self.safe_since.remove(&role);
            return;
        }
        let since = *self.safe_since.entry(role).or_insert(now);
        let carried_out = self.last_step_down.get(&role).filter(|(_, from)| current < *from);
        let rested = carried_out.map_or(now, |(at, _)| *at + PAUSE_AFTER_STEP_DOWN);
        let remaining = rested.max(since + self.policy.stabilisation).since(now);
        model.limits.scale_down_after = Some(remaining).filter(|remaining| remaining.0 > 0);
    }

    fn remember(&mut self, decision: &Decision) {
        let numbers = decision.targets.iter().map(|target| (target.variant.clone(), target.replicas));
        let replicas: BTreeMap<VariantName, u32> = numbers.collect();
        let unchanged = self.last.as_ref().filter(|last| last.replicas == replicas);
        let changed_at = unchanged.map_or(decision.decided_at, |last| last.changed_at);
        self.last = Some(LastDecision { changed_at, replicas });
    }
}

/// One model, while it is decided.
struct DecisionContext<'a> {
    input: &'a ModelLoad,
    /// By name, with the last decision.
    states: &'a [VariantState],
    limits: StepLimits,
    is_split: bool,
}

/// Whether the engines of the model compute different parts of its requests.
fn is_split(input: &ModelLoad) -> bool {
    let states = input.states.iter().map(|state| state.role);
    states.chain(input.replicas.iter().map(|metrics| metrics.role)).any(|role| role != Role::Both)
}

impl<'a> DecisionContext<'a> {
    /// The roles of the variants, in the order of their names.
    fn roles(&self) -> BTreeSet<Role> {
        if !self.is_split && !self.input.replicas.is_empty() {
            return BTreeSet::from([Role::Both]);
        }
        self.states.iter().map(|state| state.role).collect()
    }

    fn states_of(&self, role: Role) -> Vec<VariantState> {
        self.states.iter().filter(|state| state.role == role).cloned().collect()
    }

    /// The replicas of this role, by name. A replica has the role of its variant.
    ///
    /// Replicas without a variant count only in an undivided model of the profiles that ask for no state.
    fn replicas_of(&self, profile: Profile, role: Role, states: &[VariantState]) -> Vec<&'a ReplicaMetrics> {
        let all_count = profile != Profile::Rouse && !self.is_split && role == Role::Both;
        let is_known =
            |metrics: &&ReplicaMetrics| states.iter().any(|state| state.variant == metrics.variant);
        let mut replicas: Vec<&ReplicaMetrics> =
            self.input.replicas.iter().filter(|metrics| all_count || is_known(metrics)).collect();
        replicas.sort_by(|metrics, other| {
            (&metrics.variant, &metrics.replica).cmp(&(&other.variant, &other.replica))
        });
        replicas
    }
}

/// Adds replicas that serve and do not report, as [`Profile::Rouse`] sees them: their load is unknown.
fn with_unknown(
    profile: Profile,
    replicas: &[&ReplicaMetrics],
    states: &[VariantState],
) -> Vec<ReplicaMetrics> {
    let mut all: Vec<ReplicaMetrics> = replicas.iter().copied().cloned().collect();
    if profile != Profile::Rouse {
        return all;
    }
    for state in states {
        let serving = usize::try_from(state.current.saturating_sub(state.pending)).unwrap_or(usize::MAX);
        let reporting = replicas.iter().filter(|metrics| metrics.variant == state.variant).count();
        let missing =
            ReplicaMetrics { variant: state.variant.clone(), role: state.role, ..Default::default() };
        all.extend(std::iter::repeat_n(missing, serving.saturating_sub(reporting)));
    }
    all
}

/// Adds each replica's share of the requests that wait at the gateways, in [`Profile::Rouse`].
///
/// A model that queues at the gateways would look unsaturated otherwise. Decoding follows on a prefill, so a request
/// waits for no replica that only decodes.
fn with_parked(
    profile: Profile,
    role: Role,
    mut replicas: Vec<ReplicaMetrics>,
    parked: u32,
) -> Vec<ReplicaMetrics> {
    if profile == Profile::Rouse && role != Role::Decode && parked > 0 {
        let awake = u32::try_from(replicas.len()).unwrap_or(u32::MAX);
        let share = f64::from(parked) / f64::from(awake.max(1));
        for metrics in &mut replicas {
            metrics.waiting = metrics.waiting.map(|waiting| waiting + share);
        }
    }
    replicas
}

/// Puts the numbers of another autoscaler in place of the steps. Returns whether there are any.
///
/// Another autoscaler does not stop a model that runs: that is for the zero rule.
fn apply_external(input: &ModelLoad, states: &[VariantState], targets: &mut [Target]) -> bool {
    let Some(external) = &input.external else {
        return false;
    };
    let number = |state: &VariantState| external.get(&state.variant).copied();
    let stops = states.iter().all(|state| number(state).unwrap_or_else(|| state.held()) == 0);
    let runs = states.iter().any(|state| state.current > 0);
    for target in targets {
        if let Some(state) = states.iter().find(|state| state.variant == target.variant) {
            let replicas = number(state).filter(|_| !(stops && runs)).unwrap_or_else(|| state.held());
            *target = Target::bounded(state, replicas, TargetReason::External);
        }
    }
    true
}

/// Lowers the targets to the accelerators that are free.
fn allocate(states: &[VariantState], decision: &mut Decision) {
    let Some(pool) = &mut decision.accelerators_left else {
        return;
    };
    let mut spare_kv = BTreeMap::new();
    for analysis in decision.analyses.values() {
        spare_kv.extend(analysis.variants.iter().map(|(name, variant)| (name.clone(), variant.avg_spare_kv)));
    }
    let by_name: BTreeMap<&VariantName, &VariantState> =
        states.iter().map(|state| (&state.variant, state)).collect();
    decision.allocations = limiter::limit(&mut decision.targets, &by_name, &spare_kv, pool);
}
