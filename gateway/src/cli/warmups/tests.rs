use rouse_controllers::crd::warmup::{WarmupNodeState, WarmupNodeStatus};

use super::*;

fn summary(name: &str, phase: Option<WarmupStatusPhase>, nodes: [u32; 4]) -> WarmupSummary {
    let [desired, active, succeeded, failed] = nodes;
    WarmupSummary {
        namespace: "chat".to_owned(),
        name: name.to_owned(),
        target: "model qwen".to_owned(),
        phase,
        desired,
        active,
        succeeded,
        failed,
        ..WarmupSummary::default()
    }
}

fn running() -> WarmupSummary {
    let node = WarmupNodeStatus {
        node: "gpu-3".to_owned(),
        item: Some("vllm:1".to_owned()),
        state: WarmupNodeState::Pending,
        cause: Some("RateLimited".to_owned()),
        message: Some("the registry\nlimits pulls".to_owned()),
        attempts: 2,
        next_try: None,
        duration_millis: None,
        digest: None,
    };
    WarmupSummary {
        message: Some("3 nodes left".to_owned()),
        nodes: vec![node],
        more_nodes: 7,
        ..summary("qwen-warmup", Some(WarmupStatusPhase::InProgress), [8, 2, 4, 1])
    }
}

fn args(warmup: Option<&str>, namespace: Option<&str>) -> WarmupsArgs {
    #[derive(clap::Parser)]
    struct Parsed {
        #[command(flatten)]
        args: WarmupsArgs,
    }
    let words = ["warmups"].into_iter().chain(warmup);
    let words = words.chain(namespace.into_iter().flat_map(|namespace| ["-n", namespace]));
    <Parsed as clap::Parser>::parse_from(words).args
}

#[test]
fn a_table_has_one_row_for_each_warmup_and_the_nodes_of_a_named_one() {
    let new = summary("copy", None, [0, 0, 0, 0]);
    let text = render_table(&[new, running()], false, false);
    assert_eq!(
        text,
        "WARMUP            PHASE       WARM  ACTIVE  FAILED  TARGET      REASON\n\
         chat/copy         New         0/0   0       0       model qwen\n\
         chat/qwen-warmup  InProgress  4/8   2       1       model qwen  3 nodes left\n"
    );
    let text = render_table(&[running()], true, false);
    let nodes = "\nNODE   STATE    ITEM    FAILURES  REASON\n\
                 gpu-3  Pending  vllm:1  2         the registry\u{fffd}limits pulls\n\
                 and 7 more\n";
    assert!(text.ends_with(nodes), "{text}");
    assert_eq!(render_table(&[], false, false), "There are no Warmups.\n");
    assert!(render_table(&[running()], false, true).contains("\x1b[33mInProgress\x1b[0m"));
}

#[test]
fn a_bar_shows_warm_active_waiting_and_failed_nodes() {
    let bar_of = |nodes| bar(&summary("w", None, nodes));
    assert_eq!(bar_of([8, 2, 4, 1]), "[############------...!!!]");
    assert_eq!(bar_of([0, 0, 0, 0]), "[........................]");
    assert_eq!(bar_of([3, 0, 3, 0]), "[########################]");
    assert_eq!(
        bar_of([5000, 50, 4949, 1]),
        "[#######################!]",
        "it is not full, and shows the failure"
    );
    // Counts of two moments may add up to more than all.
    assert_eq!(bar_of([2, 2, 2, 2]), "[########################]");
    assert_eq!(bar_of([u32::MAX; 4]).len(), 26);
}

#[test]
fn bars_are_aligned_and_say_what_is_left() {
    let done = WarmupSummary {
        message: Some("all nodes are warm".to_owned()),
        ..summary("w", Some(WarmupStatusPhase::Completed), [3, 0, 3, 0])
    };
    let text = render_bars(&[running(), done], false);
    assert_eq!(
        text,
        "chat/qwen-warmup  [############------...!!!]  InProgress 4/8 nodes warm, 2 active, 1 failed: 3 nodes left\n\
         chat/w            [########################]  Completed 3/3 nodes warm\n"
    );
    assert!(render_bars(&[running()], true).contains("\ngpu-3  Pending"), "the nodes of a named one");
}

#[test]
fn without_a_terminal_only_changes_are_printed() {
    let mut printed = BTreeMap::new();
    let first = "chat/qwen-warmup: InProgress 4/8 nodes warm, 2 active, 1 failed: 3 nodes left";
    assert_eq!(changed_lines(&mut printed, &[running()]), [first]);
    assert_eq!(changed_lines(&mut printed, &[running()]), [""; 0]);
    let done = summary("qwen-warmup", Some(WarmupStatusPhase::Completed), [8, 0, 8, 0]);
    assert_eq!(changed_lines(&mut printed, &[done]), ["chat/qwen-warmup: Completed 8/8 nodes warm"]);
    assert_eq!(changed_lines(&mut printed, &[]), ["chat/qwen-warmup: deleted"]);
}

#[test]
fn a_filter_selects_by_namespace_and_name_and_finds_what_it_names() {
    let in_namespace = |namespace: &str, name: &str| WarmupSummary {
        namespace: namespace.to_owned(),
        ..summary(name, None, [0; 4])
    };
    let all = || vec![in_namespace("chat", "a"), in_namespace("chat", "b"), in_namespace("search", "a")];
    for (warmup, namespace, expected) in [
        (None, None, Ok(3)),
        (None, Some("chat"), Ok(2)),
        (None, Some("nowhere"), Ok(0)),
        (Some("a"), None, Ok(2)),
        (Some("search/a"), None, Ok(1)),
        (Some("b"), Some("chat"), Ok(1)),
        (Some("b"), Some("search"), Err("there is no Warmup search/b")),
        (Some("c"), None, Err("there is no Warmup c")),
        (Some("chat/a"), Some("chat"), Err("the namespace is given twice")),
    ] {
        let found = WarmupFilter::of(&args(warmup, namespace)).and_then(|filter| filter.select(all()));
        match (found, expected) {
            (Ok(found), Ok(number)) => assert_eq!(found.len(), number, "{warmup:?} {namespace:?}"),
            (Err(error), Err(text)) => assert!(error.to_string().starts_with(text), "{error}"),
            (found, _) => panic!("{warmup:?} {namespace:?}: {found:?}"),
        }
    }
}
