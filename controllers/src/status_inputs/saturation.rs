//! What saturation decided about models, as their statuses have it.

use rouse::model::ModelName;

use super::StatusInputs;
use crate::status::SaturationFacts;

impl StatusInputs {
    /// Records what saturation decided about the model.
    pub(crate) fn record_saturation(&self, model: &ModelName, decided: SaturationFacts) {
        let mut inner = self.lock();
        if inner.saturation.get(model) == Some(&decided) {
            return;
        }
        inner.saturation.insert(model.clone(), decided.clone());
        let Some(facts) = inner.facts.get_mut(model) else { return };
        facts.saturation = Some(decided);
        inner.changed_models.insert(model.clone());
        drop(inner);
        self.changed.notify_one();
    }

    /// Forgets what saturation decided, because another gateway may decide now. Statuses keep what is written in them.
    pub(crate) fn forget_saturation(&self) {
        let mut inner = self.lock();
        let forgotten = std::mem::take(&mut inner.saturation);
        if forgotten.is_empty() {
            return;
        }
        for model in forgotten.into_keys() {
            if let Some(facts) = inner.facts.get_mut(&model) {
                facts.saturation = None;
                inner.changed_models.insert(model);
            }
        }
        drop(inner);
        self.changed.notify_one();
    }

    /// Forgets what saturation decided about this model, which it no longer scales.
    ///
    /// Otherwise the status would have the old targets again once saturation scales the model anew.
    pub(crate) fn forget_saturation_of(&self, model: &ModelName) {
        let mut inner = self.lock();
        inner.saturation.remove(model);
        let Some(facts) = inner.facts.get_mut(model).filter(|facts| facts.saturation.is_some()) else {
            return;
        };
        facts.saturation = None;
        inner.changed_models.insert(model.clone());
        drop(inner);
        self.changed.notify_one();
    }
}
