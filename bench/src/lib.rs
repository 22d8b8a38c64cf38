//! How fast Posthouse is, beside what the machine and Postgres can do at all.
//!
//! A run measures [`Scenario`]s in rounds: a warm-up that is thrown away, then every scenario once a round, so that what
//! else the machine does meets all of them alike. One scenario is the *floor*: raw statements without any queue. Every
//! other figure is also told as a ratio to the floor of the same round, which compares across machines.
//!
//! The modules, in reading order: [`options`] and `sizes` (what to measure, and how much of it), `ground` (the server, and a
//! fresh database a scenario), `jobs`; the scenarios: `floor`, `enqueue`, `work`, `fair`, `gated`, `large`; those with processes of their own,
//! by `crew` and [`part`]: `processes`, `in_flight`, `llm`; those over time: `backlog` with `claims` and `tables`, `retention`, `pinned` with
//! `steady`, `pin` and `statements`; then `figure` (medians and ratios), `machine`, and [`report`] with [`plot`] (what comes out).

mod backlog;
mod claims;
mod crew;
mod enqueue;
pub mod error;
mod fair;
mod figure;
mod floor;
mod gated;
mod ground;
mod in_flight;
mod jobs;
mod large;
mod latency;
mod llm;
mod machine;
pub mod options;
pub mod part;
mod pin;
mod pinned;
pub mod plot;
mod processes;
pub mod report;
mod retention;
mod sizes;
mod statements;
mod steady;
mod tables;
mod work;

use std::time::{Instant, SystemTime};

use error::Result;
use figure::Sample;
use ground::Ground;
use machine::Machine;
use options::{Options, Scenario};
use report::Report;
use sizes::Sizes;

/// Measures, and answers with the report; `None` if `interrupted` was ready first. Whatever happens, the databases that
/// it made are dropped and its server is stopped. `tell` is given a line before each measurement.
///
/// Some scenarios have workers in processes of their own: the program that calls this, started again. It must call
/// [`part::run`] instead if [`part::is_wanted`].
///
/// # Errors
///
/// No server can be started or reached, or a scenario fails.
pub async fn run(
    options: Options,
    interrupted: impl Future<Output = ()>,
    tell: impl Fn(&str),
) -> Result<Option<Report>> {
    let ground = Ground::new(options.database_url.as_deref()).await?;
    let measured = tokio::select! {
        measured = measure(&options, &ground, tell) => Some(measured),
        () = interrupted => None,
    };
    ground.clear().await;
    measured.transpose()
}

async fn measure(options: &Options, ground: &Ground, tell: impl Fn(&str)) -> Result<Report> {
    let (started_at, clock) = (SystemTime::now(), Instant::now());
    let machine = Machine::look();
    let sizes = options.sizes();
    let scenarios = options.scenarios();
    let repeats = scenarios.iter().map(|scenario| *options.rounds(*scenario).end()).max().unwrap_or_default();
    let mut rounds = Vec::new();
    for round in 0..=repeats {
        let mut samples = Vec::new();
        for &scenario in scenarios.iter().filter(|scenario| options.rounds(**scenario).contains(&round)) {
            tell(&match round {
                0 => format!("warm-up: {scenario}"),
                _ => format!("round {round} of {}: {scenario}", options.rounds(scenario).end()),
            });
            let sizes = if round == 0 { sizes.warm_up() } else { sizes };
            samples.push((scenario, one(scenario, ground, &sizes).await?));
        }
        if round > 0 {
            rounds.push(samples);
        }
    }
    Ok(Report {
        posthouse: env!("CARGO_PKG_VERSION"),
        build: if cfg!(debug_assertions) { "debug" } else { "release" },
        postgres: ground.setting("server_version").await?,
        private_server: options.database_url.is_none(),
        server_settings: ground.settings().await?,
        started_at: humantime::format_rfc3339_seconds(started_at).to_string(),
        seconds: clock.elapsed().as_secs_f64(),
        repeats,
        quick: options.quick,
        machine: machine.finish(),
        scenarios: scenarios.iter().map(|&scenario| report::scenario(scenario, &sizes, &rounds)).collect(),
    })
}

/// One scenario, once, in a database of its own.
async fn one(scenario: Scenario, ground: &Ground, sizes: &Sizes) -> Result<Vec<Sample>> {
    let scratch = ground.scratch().await?;
    let samples = match scenario {
        Scenario::Floor => floor::measure(&scratch, sizes).await,
        Scenario::EnqueueSingle => enqueue::single(&scratch, sizes).await,
        Scenario::EnqueueConcurrent => enqueue::concurrent(&scratch, sizes).await,
        Scenario::EnqueueBulk => enqueue::bulk(&scratch, sizes).await,
        Scenario::Drain => work::drain(&scratch, sizes).await,
        Scenario::DrainNoHistory => work::drain_no_history(&scratch, sizes).await,
        Scenario::DrainMulti => processes::drain_multi(&scratch, sizes).await,
        Scenario::Scaling => processes::scaling(&scratch, sizes).await,
        Scenario::Latency => latency::latency(&scratch, sizes).await,
        Scenario::InFlight => in_flight::measure(&scratch, sizes.in_flight, sizes.in_flight_time).await,
        Scenario::InFlight10k => in_flight::measure(&scratch, sizes.in_flight_10k, sizes.in_flight_time).await,
        Scenario::Llm => llm::measure(&scratch, sizes).await,
        Scenario::Fair => fair::measure(&scratch, sizes).await,
        Scenario::Gated => gated::measure(&scratch, sizes).await,
        Scenario::Rates => gated::rates(&scratch, sizes).await,
        Scenario::LargePayload => large::measure(&scratch, sizes).await,
        Scenario::Tenants => backlog::tenants(&scratch, sizes).await,
        Scenario::Backlog => backlog::depths(&scratch, sizes).await,
        Scenario::Retention => retention::archived(&scratch, sizes).await,
        Scenario::DropPartition => retention::dropped(&scratch, sizes).await,
        Scenario::PinnedSnapshot => pinned::measure(ground, sizes).await,
    }?;
    ground.drop_database(&scratch.name).await?;
    Ok(samples)
}
