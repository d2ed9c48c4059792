//! Warmups: the vectors of KEP-129's rules, its state machine, and every edge case that decisions can show.
//!
//! | Edge case | Shown by `edge_cases` or, where named, by |
//! |---|---|
//! | node deleted in the middle | `a_node_that_is_deleted_fails_at_once_if_it_was_named_or_had_begun` |
//! | deleted node comes back | `keep_warm::a_node_that_is_deleted_and_comes_back_under_its_name_is_warmed_again` |
//! | node created again under its name | `recreated` |
//! | node cordoned, not ready, tainted | `a_node_that_takes_no_pods_is_named_with_its_cause_and_takes_no_room` |
//! | host name label differs from the node's name | the controller: Pods are bound by the node's name |
//! | node by name or by the scheduler | the controller: affinity, so quota and resources apply |
//! | node full | `a_full_node_waits_without_a_failure` |
//! | ImagePullBackOff | `causes::texts_of_runtimes_and_registries_are_recognised`, `a_pull_that_fails_counts` |
//! | bad image reference | the conversion refuses it; `a_refused_spec_creates_no_pod` |
//! | image without a shell, other platform | `an_image_that_cannot_start_is_present_nevertheless` |
//! | image whose entrypoint needs rights | `a_quota_or_admission_refuses_and_is_named_with_a_pause` |
//! | image collected by the kubelet | `a_node_that_loses_an_image_is_warmed_again_if_it_is_kept_warm` |
//! | disk full, DiskPressure | `a_full_disk_backs_off_and_disk_pressure_waits` |
//! | failed Pods are collected | `attempts_survive_the_collection_of_pods_and_a_restart` |
//! | unlimited retries | `retries_without_a_limit_back_off_to_minutes` |
//! | Pods deleted by hand | `pods_deleted_by_hand_change_no_outcome` |
//! | Pods deleted while they pull | `interruptions::a_client_that_deletes_pods_meets_longer_pauses_each_time` |
//! | creations fail | `a_quota_or_admission_refuses_and_is_named_with_a_pause` |
//! | group without bound Pods; missing group | `a_target_that_is_not_there_is_waited_for_and_then_missed` |
//! | spec edited while it runs | `an_edit_redoes_the_nodes_whose_items_changed_and_no_others` |
//! | Pod being deleted | `a_terminating_pod_still_takes_room` |
//! | target set shrinks | `nodes_outside_the_targets_do_not_count` |
//! | two Warmups, one node | `two_warmups_pull_the_same_image_one_after_the_other` |
//! | action with a sidecar or daemon | `an_action_that_stays_running_is_done_when_it_is_ready` |
//! | rules tightened later | the conversion: the schema stays loose |

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod causes;
mod edge_cases;
mod harness;
mod interruptions;
mod keep_warm;
mod labels;
mod properties;
mod records;
mod recreated;
mod restarts;
mod state_machine;
mod vectors;
