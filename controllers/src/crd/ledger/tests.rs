use super::*;

fn reservation(id: u64) -> Reservation {
    Reservation {
        id,
        model: ObjectName::new("team-a", "llama"),
        variant: VariantName::default(),
        replica: 0,
        count: 1,
        bytes: Bytes::gib(80),
        host_bytes: Bytes::ZERO,
        node: None,
        accelerators: Vec::new(),
        state: ReservationState::Reserved,
        since: Tick(1_780_000_000_000),
    }
}

fn uuid(seed: u64) -> AcceleratorId {
    // Any bits will do, as long as they do not repeat.
    let mixed = |n: u64| (seed + n).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (seed << 17);
    let (high, low) = (mixed(1), mixed(2));
    AcceleratorId::from(format!(
        "GPU-{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        high >> 32,
        high >> 16 & 0xffff,
        high & 0xffff,
        low >> 48,
        low & 0xffff_ffff_ffff
    ))
}

fn round(ledger: &Ledger) -> Ledger {
    serde_json::from_str(&serde_json::to_string(ledger).unwrap()).unwrap()
}

#[test]
fn what_is_packed_comes_back_as_it_was() {
    let placed = Reservation {
        count: 2,
        host_bytes: Bytes::gib(16),
        node: Some("gpu-node-1".into()),
        accelerators: vec![uuid(7), uuid(3)],
        state: ReservationState::Placed,
        replica: 40,
        since: Tick(1_000),
        ..reservation(9)
    };
    let named = Reservation {
        model: ObjectName::new("team-b", "other"),
        accelerators: vec!["cpu 0".into(), "GPU-not-a-uuid".into(), "MIG-1".into()],
        state: ReservationState::Asleep,
        ..placed.clone()
    };
    let ledger = Ledger {
        next: u64::MAX,
        reservations: vec![
            reservation(0),
            reservation(1),
            Reservation { id: 8, ..placed.clone() },
            placed,
            Reservation { id: 1 << 40, ..named.clone() },
            // Accelerators without a node: nobody should write that, and nothing is lost of it.
            Reservation { id: (1 << 40) + 1, node: None, bytes: Bytes(u64::MAX), ..named },
            Reservation { state: ReservationState::Releasing, ..reservation(u64::MAX - 1) },
        ],
    };
    assert_eq!(round(&ledger), ledger);
    assert_eq!(round(&Ledger::default()), Ledger::default());
}

#[test]
fn a_variant_is_a_third_part_of_its_row_and_the_default_has_none() {
    let large = Reservation { variant: "large".into(), ..reservation(1) };
    let ledger = Ledger { next: 2, reservations: vec![reservation(0), large] };
    assert_eq!(round(&ledger), ledger);
    let written = serde_json::to_value(&ledger).unwrap();
    let rows: Vec<Vec<String>> = serde_json::from_value(written["models"].clone()).unwrap();
    let [default, large] = rows.as_slice() else { panic!("{rows:?}") };
    assert_eq!((default.len(), default[0].as_str()), (2, "team-a/llama"));
    assert_eq!((large.len(), large[0].as_str(), large[2].as_str()), (3, "team-a/llama", "large"));
}

#[test]
fn forty_thousand_reservations_are_far_below_what_an_object_may_have() {
    // 1,000 nodes with 8 accelerators; on each accelerator one engine awake and four asleep, of 2,000 models.
    let mut reservations = Vec::new();
    for id in 0..40_000_u64 {
        let (node, accelerator, layer) = (id / 8 % 1000, id % 8, id / 8000);
        let state = if layer == 0 { ReservationState::Placed } else { ReservationState::Asleep };
        let model = id * 7919 % 2000;
        reservations.push(Reservation {
            model: ObjectName::new(format!("team-{}", model % 50), format!("model-{model}-instruct")),
            replica: (id / 2000) as u32,
            bytes: if layer == 0 { Bytes::gib(60) } else { Bytes(2_863_311_530) },
            host_bytes: if layer == 0 { Bytes::ZERO } else { Bytes::gib(16) },
            node: Some(format!("gpu-node-{node:04}.example.internal")),
            accelerators: vec![uuid(node * 8 + accelerator)],
            state,
            // Within a month, in no order.
            since: Tick((1_780_000_000 + id * 7_919_993 % 2_600_000) * 1000),
            ..reservation(1_000_000 + id * 3)
        });
    }
    let ledger = Ledger { next: 2_000_000, reservations };
    let text = serde_json::to_string(&ledger).unwrap();
    println!("40,000 reservations take {} bytes", text.len());
    assert!(text.len() < 800 << 10, "{} bytes", text.len());
    assert_eq!(round(&ledger), ledger);
}

#[test]
fn what_somebody_else_wrote_is_refused_whole() {
    let read = |text: &str| serde_json::from_str::<Ledger>(text);
    let ledger = |node: &str, shape: &str, model: &str| {
        format!(r#"{{"next":5,"nodes":[{node}],"shapes":[{shape}],"models":[{model}]}}"#)
    };
    let (node, shape, model) = (r#"["n","","a"]"#, r#"["Placed","1","5","0"]"#, r#"["a/b","AAAABA"]"#);
    // The smallest that is well written, so that what follows fails for its own reason.
    assert_eq!(read(&ledger(node, shape, model)).unwrap().reservations.len(), 1);
    let refused = |text: String, why: &str| {
        let error = read(&text).expect_err(&text).to_string();
        assert!(error.contains(why), "{text}: {error}");
    };
    for (model, why) in [
        (r#"["a/b"]"#, "1 parts"),
        (r#"["a/b","AAAABA","c","d"]"#, "4 parts"),
        (r#"["ab","AAAABA"]"#, "'ab'"),
        (r#"["a/b","AAAAB"]"#, "digits"),
        (r#"["a/b","AA!ABA"]"#, "digits"),
        (r#"["a/b","______________A"]"#, "digits"),
        (r#"["a/b","CAAABA"]"#, "does not list"),
        (r#"["a/b","AAAACA"]"#, "does not list"),
        (r#"["a/b","AAAABB"]"#, "does not list"),
        (r#"["a/b","BAAABCAB"]"#, "does not list"),
        (r#"["a/b","AAAABAAAAABA"]"#, "the id 0 is used twice"),
        (r#"["a/b","AAAUBA"]"#, "the id 10 "),
        (r#"["a/b","AAABBA"]"#, "the id 18446744073709551615 "),
    ] {
        refused(ledger(node, shape, model), why);
    }
    for (shape, why) in [
        (r#"["Placed","1","5"]"#, "3 parts"),
        (r#"["Lost","1","5","0"]"#, "'Lost'"),
        (r#"["Placed","one","5","0"]"#, "'one'"),
        (r#"["Placed","1","x","0"]"#, "'x'"),
    ] {
        refused(ledger(node, shape, model), why);
    }
    for node in [r#"["n"]"#, "[]"] {
        refused(ledger(node, shape, model), "parts");
    }
    for uuids in ["AAAA", "______________________", "aä", &"A".repeat(23)] {
        refused(ledger(&format!(r#"["n","{uuids}","a"]"#), shape, model), "digits");
    }
}
