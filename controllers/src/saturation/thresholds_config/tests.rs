use super::*;

fn map(entries: &[(&str, &str)]) -> ConfigMap {
    let data = entries.iter().map(|(key, text)| ((*key).to_owned(), (*text).to_owned()));
    ConfigMap { data: Some(data.collect()), ..ConfigMap::default() }
}

fn parsed(entries: &[(&str, &str)]) -> ThresholdsConfig {
    let mut config = ThresholdsConfig::default();
    config.apply(Some(&map(entries)));
    config
}

fn found(config: &ThresholdsConfig, model: &str) -> ModelThresholds {
    config.of_model(Profile::Rouse, model, "chat", &ThresholdEntry::default())
}

fn reason(config: &ThresholdsConfig, model: &str) -> String {
    found(config, model).refused.unwrap_or_default()
}

#[test]
fn without_a_config_map_the_built_in_thresholds_hold() {
    let mut config = ThresholdsConfig::default();
    assert!(!config.apply(None));
    let built_in = ModelThresholds { thresholds: Thresholds::default(), refused: None };
    assert_eq!(found(&config, "llama"), built_in);
}

#[test]
fn an_entry_names_its_model_by_its_key_or_inside_because_an_api_server_refuses_such_keys() {
    let inside = "model_id: meta/llama\nnamespace: chat\nqueueLengthThreshold: 8\nqueueSpareTrigger: 4";
    let config = parsed(&[("llama", inside), ("qwen#chat", "queueLengthThreshold: 9"), ("qwen#b", "{}")]);
    assert_eq!(found(&config, "meta/llama").thresholds.queue_length, 8.0);
    assert_eq!(found(&config, "qwen").thresholds.queue_length, 9.0);
    assert_eq!(config.refused_count(), 0);

    for (entries, key, words) in [
        (vec![("llama", "queueLengthThreshold: 8")], "llama", "does not name its model"),
        (vec![("a#chat", "model_id: b\nnamespace: chat")], "a#chat", "another model"),
        (vec![("llama", inside), ("other", inside)], "other", "another entry is for meta/llama#chat"),
        (vec![("default", "queueLengthThreshold: many")], "default", "floating point at line 1"),
    ] {
        let config = parsed(&entries);
        let error = config.table.refused().get(key).map(ToString::to_string).unwrap_or_default();
        assert!(config.refused_count() == 1 && error.contains(words), "{key}: {error}");
    }
}

#[test]
fn the_last_good_entry_stays_while_its_successor_is_wrong_and_goes_with_its_key() {
    let good = "model_id: qwen\nnamespace: chat\nkvCacheThreshold: 0.6";
    let mut config = parsed(&[("default", "queueLengthThreshold: 9"), ("qwen", good)]);
    let broken = [("default", "queueSpareTrigger: 7"), ("qwen", "kvCacheThreshold: [")];
    assert!(config.apply(Some(&map(&broken))));
    assert!(!config.apply(Some(&map(&broken))), "nothing changed");
    assert_eq!(config.refused_count(), 2);
    assert_eq!(found(&config, "llama").thresholds.queue_length, 9.0);
    assert_eq!(found(&config, "qwen").thresholds.kv_cache, 0.6);
    let why = reason(&config, "llama");
    assert!(why.contains("entry default") && why.contains("queueSpareTrigger (7)"), "{why}");
    let why = reason(&config, "qwen");
    assert!(why.contains("entry qwen#chat"), "{why}");

    assert!(config.apply(None));
    assert_eq!((found(&config, "qwen").thresholds, config.refused_count()), (Thresholds::default(), 0));
}

#[test]
fn the_model_s_own_spec_goes_over_everything_unless_it_makes_no_sense() {
    let config = parsed(&[("default", "queueLengthThreshold: 4\nqueueSpareTrigger: 2")]);
    let own = |length| ThresholdEntry { queue_length_threshold: Some(length), ..ThresholdEntry::default() };
    let found = config.of_model(Profile::Rouse, "qwen", "chat", &own(6.0));
    assert_eq!((found.thresholds.queue_length, found.thresholds.queue_spare_trigger), (6.0, 2.0));
    assert_eq!(found.refused, None);
    let found = config.of_model(Profile::Rouse, "qwen", "chat", &own(1.0));
    assert_eq!(found.thresholds.queue_length, 4.0);
    assert!(found.refused.unwrap().starts_with("spec.saturation is ignored: queueSpareTrigger (2)"));
}
