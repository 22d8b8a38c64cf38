//! Limits that hold for the whole fleet: set for a model and for a system that is easily overrun, passed by the calls of a handler.
//!
//! ```text
//! DATABASE_URL=postgres://… cargo run --example gates
//! ```

use std::time::Duration;

use posthouse::store::GateLimits;
use posthouse::worker::Event;
use posthouse::{Context, Job, Posthouse, Worker};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Answer {
    ticket: u32,
}

impl Job for Answer {
    const KIND: &'static str = "answer";
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Two calls, each admitted by itself. What is to be asked again after a long wait comes first, what costs money last.
async fn answer(job: Answer, context: Context) -> Result<String, AnyError> {
    let permit = context.gate("crm").admit(0).await?;
    let customer = format!("customer {}", job.ticket);
    drop(permit);

    let model = context.model_instead().unwrap_or("example").to_owned();
    let permit = context.gate(format!("model:{model}")).admit(500).await?;
    let (text, tokens) = (format!("Dear {customer}, it is on its way."), 120);
    permit.used(tokens).await;
    println!("ticket {} answered in attempt {}", job.ticket, context.attempt());
    Ok(text)
}

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL (`posthouse dev` prints one)")?;
    Posthouse::migrate(&url).await?;
    let queue = Posthouse::connect(&url).await?;

    queue.set_gate("crm", &GateLimits { max_running: Some(2), ..GateLimits::default() }).await?;
    let limits =
        GateLimits { tokens_per_minute: Some(60_000), money_per_day: Some("25".into()), ..GateLimits::default() };
    queue.set_gate("model:example", &limits).await?;

    // Somebody closes a gate for a while: jobs that come to it wait in the queue and not in their slots.
    let soon = std::time::SystemTime::now() + Duration::from_secs(4);
    queue.close_gate("crm", &format!("{}", humantime::format_rfc3339(soon)), Some("a short maintenance")).await?;

    for ticket in 1..=6 {
        queue.enqueue(Answer { ticket }).await?;
    }
    let summary = Worker::builder(&queue)
        .handle(answer)
        .on_event(|event| {
            if let Event::Snoozed { job, delay, reason } = event {
                println!("job {} comes back in {delay:.1?}: {reason}", job.id);
            }
        })
        .until_empty(true)
        .run()
        .await?;
    println!("{} done, {} put off, {} retried", summary.done, summary.snoozed, summary.retried);

    for gate in queue.gates().await? {
        println!("{}: {} tokens in the last minute", gate.name, gate.tokens_last_minute);
    }
    Ok(())
}
