//! Hears notifications: that there may be work, and that somebody cancelled a job of this worker. Only hints: everything
//! is found by polling and by the heartbeat as well, so a lost notification costs time and nothing else.

use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::pause::Pause;
use crate::store::{Listener, Notice};
use crate::worker::meter::Hearing;
use crate::worker::shared::Shared;

/// Runs until it is dropped, or ends at once if there is no URL to listen on. Reads as fast as it can: a session that does not drain its socket would keep Postgres from
/// cleaning up.
pub(crate) async fn listen(shared: Arc<Shared>) {
    let mut pause = Pause::new(Duration::from_millis(100), Duration::from_secs(5));
    loop {
        let error = match hear(&shared, &mut pause).await {
            Ok(never) => match never {},
            Err(error) => error,
        };
        if !error.is_transient() && error.sqlstate().is_none() {
            shared.metered(|meter| meter.hears(Hearing::Polling));
            tracing::info!(%error, "notifications cannot be heard; polling only");
            return;
        }
        shared.metered(|meter| meter.hears(Hearing::Connecting));
        shared.call_failed(&error);
        tracing::debug!(%error, "notifications not heard; connecting again, polling meanwhile");
        tokio::time::sleep(pause.next()).await;
    }
}

/// One connection, until it breaks.
async fn hear(shared: &Shared, pause: &mut Pause) -> Result<std::convert::Infallible> {
    let mut listener = Listener::connect(&shared.database).await?;
    shared.metered(|meter| meter.hears(Hearing::Listening));
    shared.call_answered();
    pause.reset();
    // Whatever was said before LISTEN took effect was not heard: look.
    shared.wake.notify_one();
    shared.beat_now.notify_one();
    loop {
        match listener.next().await? {
            Notice::Wake { queue } => {
                // A star: a gate has opened, for whatever queue.
                if queue == "*" || shared.settings.queues.binary_search(&queue).is_ok() {
                    shared.wake.notify_one();
                }
            }
            Notice::Cancel { worker } => {
                if shared.present().is_some_and(|incarnation| incarnation.worker == worker) {
                    shared.beat_now.notify_one();
                }
            }
        }
    }
}
