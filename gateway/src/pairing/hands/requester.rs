//! Orders about requesters.

use rouse::{
    pairing::{
        command::OfRequester,
        event::{Answer, Epoch},
    },
    units::Generation,
};
use serde_json::json;

use super::{Failed, Hands, Job, Outcome, spi::Spi};
use crate::{
    controllers::dual::keys::{ACCELERATORS, REQUESTER_FINALIZER, listed},
    pairing::directory::Requester,
};

impl Hands {
    pub(super) async fn requester(&self, job: &Job, step: &OfRequester) -> Outcome {
        let own = job.requester()?;
        match step {
            OfRequester::Accelerators => self.accelerators(job, own).await,
            OfRequester::Delete { .. } => {
                self.writer.delete(&self.pods(&own.name), &own.name.name, own.id.as_str()).await?;
                Ok(Answer::Done)
            }
            OfRequester::Finalize { wanted } => self.finalize(own, *wanted).await,
            OfRequester::Release => {
                stub(own, job.command.epoch, Generation::default())?.release().await?;
                Ok(Answer::Done)
            }
        }
    }

    /// What the stub says is written down as well, so that whoever leads next need not ask.
    async fn accelerators(&self, job: &Job, own: &Requester) -> Outcome {
        let found = stub(own, job.command.epoch, Generation::default())?.accelerators().await?;
        if found.is_empty() {
            return Err(Failed::user(
                "its stub says that it was given no accelerator: ask for some in resources.limits",
            ));
        }
        let annotations = json!({ACCELERATORS: listed(&found)});
        let patch = json!({"metadata": {"uid": own.id.as_str(), "annotations": annotations}});
        self.patch(&own.name, &patch).await?;
        Ok(Answer::Accelerators(found))
    }

    async fn finalize(&self, own: &Requester, wanted: bool) -> Outcome {
        let key = if wanted { "finalizers" } else { "$deleteFromPrimitiveList/finalizers" };
        let patch = json!({"metadata": {"uid": own.id.as_str(), key: [REQUESTER_FINALIZER]}});
        self.patch(&own.name, &patch).await
    }
}

/// The requester's stub.
pub(super) fn stub(own: &Requester, epoch: Epoch, generation: Generation) -> Result<Spi, Failed> {
    let address = own.admin.ok_or_else(|| Failed::lost("its stub's address"))?;
    Ok(Spi::new(address, epoch, generation))
}
