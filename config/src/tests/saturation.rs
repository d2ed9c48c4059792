//! Tests how models are scaled by their load on one machine.

use rouse::{
    model::ScaleUpEviction,
    saturation::{Profile, SaturationPolicy, Thresholds},
    units::Millis,
};

use super::{MODEL, SaturationConfig, check, diff, errors, read};

#[test]
fn a_model_is_scaled_if_its_section_is_there_and_does_not_say_otherwise() {
    let scaled = |section: &str| {
        let config = read(&format!("{MODEL}    replicas: 3\n    saturation: {section}\n")).unwrap();
        config.saturation.models.get("qwen3-8b").copied()
    };
    assert!(read(MODEL).unwrap().saturation.models.is_empty());
    assert_eq!(scaled("{enabled: false, kvCacheThreshold: 0.9}"), None);
    let plain = scaled("{}").unwrap();
    assert_eq!((plain.policy, plain.thresholds), (SaturationPolicy::default(), Thresholds::default()));
    let own =
        scaled("{profile: latest, queueLengthThreshold: 8, kvSpareTrigger: 0.2, stabilisation: 1m}").unwrap();
    assert_eq!((own.policy.profile, own.policy.stabilisation), (Profile::Latest, Millis::secs(60)));
    let thresholds = Thresholds { queue_length: 8.0, kv_spare_trigger: 0.2, ..Thresholds::default() };
    assert_eq!(own.thresholds, thresholds);
}

#[test]
fn what_may_be_evicted_holds_for_a_model_that_is_not_scaled_too() {
    let read = |section: &str| read(&format!("{MODEL}    saturation: {section}\n")).unwrap();
    for section in ["{mayEvict: never}", "{enabled: false, mayEvict: never}"] {
        assert_eq!(read(section).core.models[0].may_evict, ScaleUpEviction::Never, "{section}");
    }
    assert_eq!(read("{}").core.models[0].may_evict, ScaleUpEviction::Idle);
}

#[test]
fn the_decisions_know_which_models_are_scaled_and_the_thresholds_of_all() {
    let spec = |section: &str| {
        let config = read(&format!("{MODEL}    saturation: {section}\n")).unwrap();
        (config.core.models[0].scaled, config.core.models[0].saturation_thresholds)
    };
    let own = Thresholds { kv_cache: 0.9, ..Thresholds::default() };
    assert_eq!(spec("{kvCacheThreshold: 0.9}"), (true, own));
    assert_eq!(spec("{enabled: false, kvCacheThreshold: 0.9}"), (false, own));
    let config = read(MODEL).unwrap();
    let silent = &config.core.models[0];
    assert_eq!((silent.scaled, silent.saturation_thresholds), (false, Thresholds::default()));
}

#[test]
fn the_gateways_times_hold_unless_the_model_has_its_own() {
    let text = format!("saturation: {{interval: 2m, stabilisation: 10m}}\n{MODEL}    saturation: {{}}\n");
    let saturation = read(&text).unwrap().saturation;
    let settings = saturation.settings;
    assert_eq!((settings.interval, settings.window), (Millis::secs(120), Millis::secs(120)));
    assert_eq!(saturation.models["qwen3-8b"].policy.stabilisation, Millis::secs(600));
    assert_eq!(read(MODEL).unwrap().saturation.settings, SaturationConfig::default());
}

#[test]
fn thresholds_that_would_never_or_always_scale_are_refused_with_the_reason() {
    let refused = |section: &str| errors(&format!("{MODEL}    saturation: {section}\n"));
    for (section, reason) in [
        ("{kvCacheThreshold: 80}", "models[0].saturation: kvCacheThreshold is 80: it must be from 0 to 1"),
        ("{queueLengthThreshold: -1}", "queueLengthThreshold is -1: it must be a number from 0"),
        ("{kvSpareTrigger: NaN}", "kvSpareTrigger is NaN: it must be from 0 to 1"),
        ("{queueSpareTrigger: 6}", "queueSpareTrigger (6) is above queueLengthThreshold (5): spare capacity"),
        ("{kvCacheThreshold: most}", "kvCacheThreshold: 'most' is not a number: write one like 0.8"),
        ("{profile: doc}", "'kvCacheThreshold' is missing: the profile doc has no default thresholds"),
        ("{profile: newest}", "saturation.profile: 'newest' is not one of: doc, latest, rouse"),
        ("{stabilisation: 5}", "models[0].saturation.stabilisation: "),
    ] {
        let error = refused(section);
        assert!(error.contains(reason), "{section}: {error}");
    }
    let doc = "{profile: doc, kvCacheThreshold: 0.8, queueLengthThreshold: 5, kvSpareTrigger: 0.1, \
               queueSpareTrigger: 3}";
    assert_eq!(refused(doc), "no error");
}

#[test]
fn all_wrong_thresholds_of_a_model_are_named_at_once() {
    let refused = |section: &str| errors(&format!("{MODEL}    saturation: {section}\n"));
    let error = refused("{kvCacheThreshold: 80, queueLengthThreshold: 2, kvSpareTrigger: -1}");
    for reason in [
        "kvCacheThreshold is 80: it must be from 0 to 1",
        "kvSpareTrigger is -1: it must be from 0 to 1",
        "queueSpareTrigger (3) is above queueLengthThreshold (2)",
    ] {
        assert!(error.contains(reason), "{reason}: {error}");
    }
    let error = refused("{kvCacheThreshold: -1}");
    assert!(!error.contains("is above"), "a trigger is not compared with a wrong threshold: {error}");
    let error = refused("{profile: doc, kvCacheThreshold: 0.8}");
    for field in ["queueLengthThreshold", "kvSpareTrigger", "queueSpareTrigger"] {
        assert!(error.contains(&format!("'{field}' is missing")), "{error}");
    }
}

#[test]
fn the_section_of_the_gateway_is_for_one_machine_and_its_window_covers_the_interval() {
    let error = errors("saturation: {interval: 30s, window: 10s}\n");
    assert!(error.contains("saturation.window: 10s is shorter than the interval (30s)"), "{error}");
    let error = errors("platform: kubernetes\nkubernetes: {stubImage: s}\nsaturation: {interval: 30s}\n");
    assert!(error.contains("under kubernetes.saturation"), "{error}");
}

#[test]
fn a_reload_tells_a_change_of_saturation_and_check_warns_of_a_model_that_cannot_grow() {
    let text = |top: &str, section: &str| format!("{top}{MODEL}    replicas: 2\n    saturation: {section}\n");
    let config = |top: &str, section: &str| read(&text(top, section)).unwrap();
    let changes = |top: &str, section: &str| diff(&config("", "{}"), &config(top, section)).to_string();
    assert_eq!(changes("", "{}"), "nothing changed");
    assert_eq!(changes("", "{kvSpareTrigger: 0.2}"), "changed qwen3-8b");
    assert_eq!(changes("", "{enabled: false}"), "changed qwen3-8b");
    assert_eq!(changes("saturation: {interval: 5s}\n", "{}"), "settings saturation");
    let warnings = |text: &str| {
        let found = check(&read(text).unwrap()).warnings;
        found.into_iter().map(|warning| warning.text).collect::<Vec<_>>().join("\n")
    };
    assert_eq!(warnings(&text("", "{}")), "");
    let alone = warnings(&format!("{MODEL}    saturation: {{}}\n"));
    assert!(alone.contains("saturation has nothing to scale: set replicas"), "{alone}");
    let rare = warnings(&text("saturation: {interval: 1s, window: 1s}\n", "{}"));
    assert!(rare.contains("saturation.window (1s) is shorter than timeouts.health.every (2s)"), "{rare}");
}
