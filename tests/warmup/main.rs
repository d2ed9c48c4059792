//! Warmups: the vectors of KEP-129's rules, its state machine, and every edge case that decisions can show.
//!
//! The second column names the test of the decisions, in `edge_cases` where no other module is named. The third names
//! the one against a real API server, in a module of the gateway's tests `cluster::warmup`.
//!
//! | Edge case | Decisions | Cluster |
//! |---|---|---|
//! | named node deleted in the middle | `a_node_that_is_deleted_fails_at_once_if_it_was_named_or_had_begun` | `nodes` |
//! | selected node deleted in the middle | the same | `node_changes` |
//! | deleted node comes back | `keep_warm` | `models` |
//! | node created again under its name | `recreated` | `node_changes`, `new_leaders` |
//! | cordoned, not ready, tainted | `a_node_that_takes_no_pods_is_named_with_its_cause_and_takes_no_room` | `nodes` |
//! | host name label differs from the node's name | the controller: Pods are bound by the node's name | `nodes` |
//! | node by name or by the scheduler | the controller: affinity, so quota and resources apply | `kep`, `pods` |
//! | toleration of everything | the conversion reads it | `node_changes` |
//! | node full | `a_full_node_waits_without_a_failure` | `nodes`, `node_changes` |
//! | ImagePullBackOff | `causes`, `a_pull_that_fails_counts` | `causes`, `numbers` |
//! | bad image reference | the conversion refuses it; `a_refused_spec_creates_no_pod` | `bad_specs`, `causes` |
//! | image without a shell, other platform | `an_image_that_cannot_start_is_present_nevertheless` | `causes` |
//! | image that is mounted as a volume | the controller: by the versions that the node reports | `image_volumes` |
//! | image whose entrypoint needs rights | `a_quota_or_admission_refuses_and_is_named_with_a_pause` | `pods` |
//! | image collected by the kubelet | `a_node_that_loses_an_image_is_warmed_again_if_it_is_kept_warm` | `models` |
//! | disk full, DiskPressure | `a_full_disk_backs_off_and_disk_pressure_waits` | `causes`, `nodes`, `node_changes` |
//! | failed Pods are collected | `attempts_survive_the_collection_of_pods_and_a_restart` | `pods`, `new_leaders` |
//! | unlimited retries | `retries_without_a_limit_back_off_to_minutes` | `limits` |
//! | Pods deleted by hand | `pods_deleted_by_hand_change_no_outcome` | `pods` |
//! | Pods deleted while they pull | `interruptions` | `retried` |
//! | Pods that fail after a pause | `pauses` | `retried` |
//! | creations fail | `a_quota_or_admission_refuses_and_is_named_with_a_pause` | `pods` |
//! | group without bound Pods; missing group | `a_target_that_is_not_there_is_waited_for_and_then_missed` | `groups` |
//! | spec edited while it runs | `an_edit_redoes_the_nodes_whose_items_changed_and_no_others` | `pods`, `retried` |
//! | Pod being deleted | `a_terminating_pod_still_takes_room` | `pods` |
//! | target set shrinks | `nodes_outside_the_targets_do_not_count` | `nodes`, `node_changes` |
//! | two Warmups, one node | `two_warmups_pull_the_same_image_one_after_the_other` | `pods` |
//! | engine that pulls | `an_engine_that_waits_for_its_image_goes_first` | `engine_pulls` |
//! | action with a sidecar or daemon | `an_action_that_stays_running_is_done_when_it_is_ready` | `actions`, `kep` |
//! | rules tightened later | the conversion: the schema stays loose | `bad_specs` |
//!
//! The rules in numbers (`vectors`) are in the cluster's `numbers`, and those of merged roles in its `groups`. What
//! depends on the clock alone stays here, in simulated time.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod causes;
mod edge_cases;
mod harness;
mod interruptions;
mod keep_warm;
mod labels;
mod pauses;
mod properties;
mod records;
mod recreated;
mod restarts;
mod state_machine;
mod vectors;
