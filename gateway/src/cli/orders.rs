//! `wake`, `sleep`, `stop`, `pin` and `unpin`: gives an order to the gateway and follows it to its end.

use std::{io::Write as _, process::ExitCode, time::Duration};

use bytes::Bytes;
use clap::Args;
use rouse::{
    fleet::report::{FleetView, ModelState, ModelView},
    units::Millis,
};
use serde::Deserialize;
use tokio::time::{self, Instant};

use super::{
    AdminArgs,
    client::{self, AdminClient, encode_path_segment},
    progress::{ProgressLine, elapsed_of, in_tenths},
    show::{replace_control_chars, truncate_to_seconds},
};

/// Pause before the first look at an order's outcome. Each next pause is longer, up to [`MAX_POLL_INTERVAL`].
const FIRST_POLL_INTERVAL: Duration = Duration::from_millis(10);
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// A model and how to follow an order for it.
#[derive(Args, Debug)]
pub(super) struct OrderArgs {
    /// Name of the model.
    model: String,
    #[command(flatten)]
    gateway: AdminArgs,
    /// Return once the gateway has accepted the order.
    #[arg(long)]
    no_wait: bool,
    /// Print the gateway's JSON answer unchanged.
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(super) struct SleepArgs {
    #[command(flatten)]
    order: OrderArgs,
    /// Sleep level: 1 keeps the weights in RAM, 2 keeps nothing. Default: as the model's idle.level says.
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=2))]
    level: Option<u8>,
}

/// An order to the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModelOrder {
    Wake,
    Sleep { level: Option<u8> },
    Stop,
    Pin,
    Unpin,
}

/// The relevant part of the response of `GET /admin/v1/operations/{id}`.
#[derive(Debug, Deserialize)]
struct OrderStatus {
    state: OrderState,
    reason: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum OrderState {
    Running,
    Done,
    Failed,
}

/// Response to an accepted order.
#[derive(Debug, Deserialize)]
struct AcceptedOrder {
    operation: u64,
}

/// An order that has ended.
pub(super) struct FinishedOrder {
    /// The gateway's answer.
    body: Bytes,
    /// Why the order failed.
    pub(super) failure: Option<String>,
    pub(super) took: Millis,
}

pub(super) async fn sleep(args: &SleepArgs) -> anyhow::Result<ExitCode> {
    run(ModelOrder::Sleep { level: args.level }, &args.order).await
}

pub(super) async fn run(order: ModelOrder, args: &OrderArgs) -> anyhow::Result<ExitCode> {
    let client = args.gateway.client();
    let before = if args.no_wait { None } else { model_view(&client, &args.model).await? };
    let accepted = client.post(&order.path(&args.model)).await?;
    let shown_name = replace_control_chars(&args.model);
    if args.no_wait {
        let mut out = std::io::stdout().lock();
        if args.json {
            writeln!(out, "{}", String::from_utf8_lossy(&accepted))?;
        } else {
            let id = operation_id(&client, &accepted)?;
            writeln!(out, "order {id} to {} {shown_name} is accepted", order.verb())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let progress = Some((before, ProgressLine::new()));
    let finished = follow(&client, &args.model, order, &accepted, progress).await?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", String::from_utf8_lossy(&finished.body))?;
    }
    if let Some(reason) = finished.failure {
        let reason = truncate_to_seconds(&replace_control_chars(&reason));
        eprintln!("rouse-gateway: cannot {} {shown_name}: {reason}", order.verb());
        return Ok(ExitCode::FAILURE);
    }
    if !args.json {
        writeln!(out, "{shown_name} is {}, after {}", order.result(), in_tenths(finished.took))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Gives an order and waits for its end, without showing progress.
pub(super) async fn execute(
    client: &AdminClient,
    model: &str,
    order: ModelOrder,
) -> Result<FinishedOrder, client::Error> {
    let accepted = client.post(&order.path(model)).await?;
    follow(client, model, order, &accepted, None).await
}

/// Waits for the end of an accepted order. `progress`: where to show it, with the model as it was before the order.
async fn follow(
    client: &AdminClient,
    model: &str,
    order: ModelOrder,
    accepted: &[u8],
    mut progress: Option<(Option<ModelView>, ProgressLine)>,
) -> Result<FinishedOrder, client::Error> {
    let path = format!("/admin/v1/operations/{}", operation_id(client, accepted)?);
    let (began, mut interval) = (Instant::now(), FIRST_POLL_INTERVAL);
    loop {
        let body = client.get(&path).await?;
        let status: OrderStatus =
            serde_json::from_slice(&body).map_err(|error| client.unexpected_response(error))?;
        if status.state != OrderState::Running {
            let unexplained = || "the gateway gave no reason".to_owned();
            let failure =
                (status.state == OrderState::Failed).then(|| status.reason.unwrap_or_else(unexplained));
            return Ok(FinishedOrder { body, failure, took: began.elapsed().into() });
        }
        if let Some((before, line)) = progress.as_mut().filter(|(_, line)| line.is_due())
            && let Some(now) = model_view(client, model).await?
        {
            let expected = before.as_ref().and_then(|before| order.expected_time(before));
            line.show(&order.progress_text(&now, line.elapsed(), expected));
        }
        time::sleep(interval).await;
        interval = (interval * 2).min(MAX_POLL_INTERVAL);
    }
}

fn operation_id(client: &AdminClient, accepted: &[u8]) -> Result<u64, client::Error> {
    let accepted: AcceptedOrder =
        serde_json::from_slice(accepted).map_err(|error| client.unexpected_response(error))?;
    Ok(accepted.operation)
}

/// Returns the model's line of the fleet; `None` for an alias or an unknown model.
pub(super) async fn model_view(
    client: &AdminClient,
    model: &str,
) -> Result<Option<ModelView>, client::Error> {
    let view: FleetView = client.get_json("/admin/v1/fleet").await?;
    Ok(view.models.into_iter().find(|line| line.name.as_str() == model))
}

impl ModelOrder {
    fn path(self, model: &str) -> String {
        let level = match self {
            Self::Sleep { level: Some(level) } => format!("?level={level}"),
            _ => String::new(),
        };
        format!("/admin/v1/models/{}/{}{level}", encode_path_segment(model), self.verb())
    }

    /// The order's name in a path, which is also its verb.
    const fn verb(self) -> &'static str {
        match self {
            Self::Wake => "wake",
            Self::Sleep { .. } => "sleep",
            Self::Stop => "stop",
            Self::Pin => "pin",
            Self::Unpin => "unpin",
        }
    }

    const fn result(self) -> &'static str {
        match self {
            Self::Wake => "awake",
            Self::Sleep { .. } => "asleep",
            Self::Stop => "stopped",
            Self::Pin => "pinned",
            Self::Unpin => "no longer pinned",
        }
    }

    /// How long the order takes by what the gateway has learned of the model, if it has.
    const fn expected_time(self, before: &ModelView) -> Option<Millis> {
        match (self, before.state) {
            (Self::Wake, ModelState::Asleep) => before.learned.wake,
            (Self::Wake, _) => before.learned.start,
            (Self::Sleep { .. }, _) => before.learned.sleep,
            (Self::Stop | Self::Pin | Self::Unpin, _) => None,
        }
    }

    fn progress_text(self, now: &ModelView, elapsed: Millis, expected: Option<Millis>) -> String {
        format!(
            "{} {}: {}, {}; {}",
            self.verb(),
            now.name,
            now.state.as_str(),
            elapsed_of(elapsed, expected),
            truncate_to_seconds(&now.reason)
        )
    }
}

#[cfg(test)]
mod tests {
    use rouse::fleet::event::LearnedMeasurements;

    use super::*;

    #[test]
    fn an_order_is_one_path_and_its_progress_says_how_long_it_takes_usually() {
        assert_eq!(ModelOrder::Wake.path("Qwen/Qwen3"), "/admin/v1/models/Qwen%2FQwen3/wake");
        assert_eq!(ModelOrder::Sleep { level: Some(2) }.path("m"), "/admin/v1/models/m/sleep?level=2");
        let mut model: ModelView = serde_json::from_str(
            r#"{"name": "m", "state": "launching", "waiting": 0, "leases": 0, "pinned": false,
                "reason": "starts since 10:00:00.123", "declared": 1, "learned": {}}"#,
        )
        .unwrap();
        let wake = ModelOrder::Wake;
        assert_eq!(wake.expected_time(&model), None);
        model.learned =
            LearnedMeasurements { start: Some(Millis::secs(40)), ..LearnedMeasurements::default() };
        let expected = wake.expected_time(&model);
        assert_eq!(
            wake.progress_text(&model, Millis(3200), expected),
            "wake m: launching, 3.2s of about 40.0s; starts since 10:00:00"
        );
    }
}
