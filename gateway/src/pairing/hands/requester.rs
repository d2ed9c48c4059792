//! Orders about requesters.

use rouse::{
    pairing::{command::OfRequester, event::Answer},
    units::Generation,
};
use serde_json::{Value, json};

use super::{Failed, Hands, Job, Outcome, spi::Spi};
use crate::{
    controllers::{
        dual::keys::{ACCELERATORS, DUAL, REQUESTER_FINALIZER, SERVER_IP, listed},
        workload::merge,
    },
    pairing::directory::{Provider, Requester},
};

impl Hands {
    pub(super) async fn requester(&self, job: &Job, step: &OfRequester) -> Outcome {
        let own = job.requester()?;
        match step {
            OfRequester::Accelerators { gate } => {
                let stub = stub(job, own, Generation::default())?;
                let (found, gated) = tokio::join!(accelerators(&stub), async {
                    if *gate { close(&stub).await } else { Ok(Answer::Done) }
                });
                gated.and(found)
            }
            OfRequester::Gate => close(&stub(job, own, Generation::default())?).await,
            OfRequester::Delete { .. } => {
                self.writer.delete(&self.pods(&own.name), &own.name.name, own.id.as_str()).await?;
                Ok(Answer::Done)
            }
            OfRequester::Finalize { wanted } => self.finalize(job, own, *wanted).await,
            OfRequester::Release => {
                stub(job, own, Generation::default())?.release().await?;
                Ok(Answer::Done)
            }
        }
    }

    /// What its stub said is written down with it, so that whoever leads next need not ask; and its engine, which saves a write
    /// once that serves.
    async fn finalize(&self, job: &Job, own: &Requester, wanted: bool) -> Outcome {
        let mut metadata = json!({"uid": own.id.as_str()});
        if wanted {
            if let Ok(provider) = job.provider() {
                metadata = named(own, provider);
            }
            let written = json!({ACCELERATORS: listed(&job.accelerators)});
            let more = json!({"finalizers": [REQUESTER_FINALIZER], "annotations": written});
            merge::into(&mut metadata, &more);
        } else {
            merge::into(
                &mut metadata,
                &json!({"$deleteFromPrimitiveList/finalizers": [REQUESTER_FINALIZER]}),
            );
        }
        self.patch(&own.name, &json!({"metadata": metadata})).await
    }
}

/// A requester's metadata with its provider, and where its engine is.
pub(super) fn named(own: &Requester, provider: &Provider) -> Value {
    json!({
        "uid": own.id.as_str(),
        "labels": {DUAL: provider.name.name},
        "annotations": {SERVER_IP: provider.ip()},
    })
}

async fn close(stub: &Spi) -> Outcome {
    stub.ready(false).await?;
    stub.shut().await?;
    Ok(Answer::Done)
}

async fn accelerators(stub: &Spi) -> Outcome {
    let found = stub.accelerators().await?;
    if found.is_empty() {
        return Err(Failed::user(
            "its stub says that it was given no accelerator: ask for some in resources.limits",
        ));
    }
    Ok(Answer::Accelerators(found))
}

/// The requester's stub.
pub(super) fn stub(job: &Job, own: &Requester, generation: Generation) -> Result<Spi, Failed> {
    let address = own.admin.ok_or_else(|| Failed::lost("its stub's address"))?;
    let spi = Spi::new(address, job.token.clone(), job.command.epoch, generation);
    Ok(spi.observed(job.calls()))
}
