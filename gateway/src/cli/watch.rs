//! `ps --watch`: shows the fleet as it changes.

use std::{future::pending, time::Duration};

use futures_util::FutureExt as _;
use rouse::fleet::report::FleetView;
use rouse_net::http_client::ResponseStream;
use tokio::time;

use super::{
    client::AdminClient,
    screen::{LiveScreen, interrupted},
    show::{render_fleet, use_color},
};

/// Longest time without a refresh: readings of meters are no events.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest time between two refreshes, however much happens.
const MIN_INTERVAL: Duration = Duration::from_millis(250);

/// Shows the fleet until interrupted.
///
/// Once it has shown something, it outlives the gateway, whose next start it shows as well.
///
/// # Errors
/// No gateway answers at first, or the gateway refuses this reader.
pub(super) async fn run(client: &AdminClient) -> anyhow::Result<()> {
    let first = read(client).await?;
    let interrupt = interrupted();
    let mut screen = LiveScreen::open()?;
    screen.show(&first)?;
    tokio::select! {
        ended = follow(client, &mut screen) => ended,
        () = interrupt => Ok(()),
    }
}

async fn follow(client: &AdminClient, screen: &mut LiveScreen) -> anyhow::Result<()> {
    let mut changes = FleetChanges { client, events: None };
    loop {
        changes.next().await;
        match read(client).await {
            Ok(text) => screen.show(&text)?,
            Err(error) if error.may_pass() => screen.set_notice(&format!("{error}; retrying"))?,
            Err(error) => return Err(error.into()),
        }
    }
}

async fn read(client: &AdminClient) -> Result<String, super::client::Error> {
    let view: FleetView = client.get_json("/admin/v1/fleet").await?;
    Ok(render_fleet(&view, use_color()))
}

/// Says when the fleet should be read again.
struct FleetChanges<'c> {
    client: &'c AdminClient,
    /// The gateway's events, whose content does not matter here.
    events: Option<ResponseStream>,
}

impl FleetChanges<'_> {
    /// Waits until something happens, but no longer than [`REFRESH_INTERVAL`].
    async fn next(&mut self) {
        time::sleep(MIN_INTERVAL).await;
        let event = time::timeout(REFRESH_INTERVAL - MIN_INTERVAL, self.next_event()).await;
        let is_open = match event {
            Ok(is_open) => is_open && self.skip_pending_events(),
            Err(_) => true,
        };
        if !is_open {
            self.events = None;
        }
    }

    /// Waits for an event. Returns false once the stream has ended, and never without a stream.
    async fn next_event(&mut self) -> bool {
        if self.events.is_none() {
            self.events = self.client.stream("/admin/v1/events").await.ok();
        }
        match &mut self.events {
            Some(events) => matches!(events.chunk().await, Ok(Some(_))),
            None => pending().await,
        }
    }

    /// Skips the events that have arrived: one refresh shows what all of them changed. Returns false at the end.
    fn skip_pending_events(&mut self) -> bool {
        let Some(events) = &mut self.events else { return false };
        loop {
            match events.chunk().now_or_never() {
                None => return true,
                Some(Ok(Some(_))) => {}
                Some(Ok(None) | Err(_)) => return false,
            }
        }
    }
}
