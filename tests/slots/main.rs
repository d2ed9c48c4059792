//! Slots: the example of the design, the cases of claims, reconciliation and node loss, and properties of every
//! interleaving.
//!
//! | Case | Shown by |
//! |---|---|
//! | five slots, one claimed, others see it Unhealthy | `example` |
//! | allocate: no such id, several ids | `claims::several_slots_are_claimed_together_or_not_at_all` |
//! | allocate: already ours, also after the container ended | `claims::a_slot_that_the_node_has_is_granted_without_a_write` |
//! | usage: same node, other node, free, for both kinds | `claims::a_claim_succeeds_by_the_usage_of_the_slot` |
//! | list: a map that changes | `claims::what_the_kubelet_may_allocate_follows_the_usage` |
//! | list: a capacity that was lowered | `claims::no_slot_above_a_lowered_capacity_is_for_a_new_container` |
//! | suffix of environment variables | `names::the_suffix_of_properties_is_the_digest` |
//! | usages: round trip | `names::a_usage_survives_being_written` |
//! | slot ids: parsed | `names::a_slot_has_the_number_of_its_name` |
//! | map of slots: construction, update | `layout` |
//! | free, with an id that does not exist | `layout::freeing_what_is_free_or_gone_changes_nothing` |
//! | virtual devices: each state of the instances | `virtual_devices::a_node_offers_by_the_state_of_the_instances` |
//! | virtual devices: selection for each state | `virtual_devices::a_choice_follows_the_state_of_the_instances` |
//! | virtual devices: allocated again, taken | `virtual_devices::an_id_that_is_allocated_again_keeps_its_slot` |
//! | reconciliation: nothing to do, add, delete, both | `reclaim` |
//! | reconciliation: a query that fails, a container that comes back | `reclaim` |
//! | nodes: added, unready, ready, deleted, gone at start | `node_loss` |
//! | nodes: ready, without an agent | `agent_loss` |
//! | Pods that were rejected | `rejected_pods` |

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod agent_loss;
mod claims;
mod example;
mod harness;
mod instance_end;
mod layout;
mod leader;
mod names;
mod node_loss;
mod properties;
mod reclaim;
mod rejected_pods;
mod virtual_devices;
mod world;
