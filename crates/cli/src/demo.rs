//! `posthouse demo`: everything at work in one command. A private Postgres, a simulated provider with bad moments, real texts,
//! several worker processes of which one is killed in the middle, and at the end the proof that nothing was lost.
//!
//! [`texts`] are the jobs, [`trouble`] is what the provider does, [`crew`] are the workers, [`screen`] shows them, [`played`]
//! is what came out, [`report`] and [`healing`] tell it. This file is the play.

mod crew;
mod healing;
mod played;
mod report;
mod screen;
mod texts;
mod trouble;

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::time::Duration;

use posthouse::private_postgres::PrivatePostgres;
use posthouse::store::{Database, JobFilter, JobRecord};
use posthouse::{NewJob, Posthouse};
use posthouse_llm::SUMMARIZE;
use posthouse_llm::sim::Sim;
use serde_json::json;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::args::{Demo, Global};
use crate::dev::{Interrupts, start, stop};
use crate::failure::{Failure, Result};
use crate::style::{BAD, BOLD, DIM, GOOD, HINT, clean};
use crew::{Crew, News, Recipe, Said};
use played::{Killed, Played, named};
use screen::{Counts, Screen};
use texts::Texts;
use trouble::{SHOW_MIN, Trouble};

/// How often the database is asked how it stands.
const LOOK_EVERY: Duration = Duration::from_millis(150);
/// From freezing a worker until what it had sent before has been dealt with.
const SETTLE_DOWN: Duration = Duration::from_millis(60);
/// The worker to be killed should hold so many jobs; after `PATIENCE` looks one will do.
const HOLDS_WANTED: usize = 2;
const PATIENCE: u32 = 20;

pub(crate) async fn run(args: Demo, global: &Global) -> Result<ExitCode> {
    let mut interrupts = Interrupts::new()?;
    let texts = if args.files.is_empty() { texts::own() } else { texts::from_files(&args.files)? };
    let mut screen = Screen::new(args.quiet, global.json);
    let played = tokio::select! {
        played = play(texts, &args, &mut screen) => played,
        code = interrupts.next() => {
            // The play is dropped, and with it workers, provider and Postgres.
            drop(screen);
            crate::output::note(format!("{DIM}interrupted; nothing is left running{DIM:#}"));
            return Ok(ExitCode::from(code));
        }
    };
    screen.end();
    let played = played?;
    let all_is_well = if global.json { played.tell_json()? } else { played.tell()? };
    Ok(if all_is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// From an empty machine to the last record, and back to an empty machine.
async fn play(texts: Texts, args: &Demo, screen: &mut Screen) -> Result<Played> {
    open(&texts, args, screen);
    screen.event("PostgreSQL starts, in a temporary folder");
    let server = start(None).await?;
    let url = server.url("postgres");
    Posthouse::migrate(&url).await?;
    let total = texts.pieces.len();
    let trouble = if args.provider_url.is_some() { Trouble::none(total) } else { Trouble::plan(total) };
    let (sim, model) = provider(args, &trouble, &texts.pieces, &server).await?;
    screen.event(&format!("PostgreSQL {} is up, the schema is in it", server.version()));

    let queue = Posthouse::new(Database::new(&url)?);
    let crew = Crew::new(Recipe { database_url: url, model });
    let mut stage = Stage::new(queue, crew, texts.pieces, trouble);
    stage.enqueue(stage.trouble.first_wave).await?;
    screen.event(&format!("{} jobs are in the queue", stage.ids.len()));
    for _ in 0..args.workers {
        stage.crew.hire()?;
    }
    screen.begin(total);
    stage.run(screen).await?;
    let played = stage.end(sim.as_ref(), screen).await?;
    if let Some(sim) = sim {
        sim.shutdown().await;
    }
    stop(server).await;
    Ok(Played { elapsed: screen.elapsed(), ..played })
}

fn open(texts: &Texts, args: &Demo, screen: &Screen) {
    let provider = match &args.provider_url {
        Some(url) => format!("the model {} at {}", args.model.as_deref().unwrap_or_default(), clean(url)),
        None => "a simulated provider that has bad moments".to_owned(),
    };
    let (total, workers) = (texts.pieces.len(), args.workers);
    screen.say(&format!("{BOLD}{total} texts, {workers} workers, {provider}. One worker will be killed.{BOLD:#}\n"));
    if texts.left_out > 0 {
        screen.say(&format!("{DIM}{} further pieces of the files are left out.{DIM:#}\n", texts.left_out));
    }
}

/// The provider, and how workers are told about it.
async fn provider(
    args: &Demo,
    trouble: &Trouble,
    texts: &[String],
    server: &PrivatePostgres,
) -> Result<(Option<Sim>, Vec<String>)> {
    if let (Some(url), Some(model)) = (&args.provider_url, &args.model) {
        let model = ["--provider-url", url.as_str(), "--model", model.as_str()];
        return Ok((None, model.map(str::to_owned).to_vec()));
    }
    let sim = Sim::start(trouble.script(texts)).await?;
    // In the server's folder, which is removed however we end.
    let config = server.directory().join("posthouse.toml");
    trouble::write_config(&config, &sim.base_url())?;
    Ok((Some(sim), vec!["--config".to_owned(), config.display().to_string()]))
}

/// What is going on.
struct Stage {
    queue: Posthouse,
    crew: Crew,
    texts: Vec<String>,
    trouble: Trouble,
    /// The job of each text that is enqueued.
    ids: Vec<i64>,
    killed: Option<Killed>,
    /// Looks at which the kill was due and nobody held enough.
    waited: u32,
    refused: BTreeMap<i64, String>,
    put_off: BTreeSet<i64>,
}

impl Stage {
    fn new(queue: Posthouse, crew: Crew, texts: Vec<String>, trouble: Trouble) -> Self {
        let (ids, refused, put_off) = (Vec::new(), BTreeMap::new(), BTreeSet::new());
        Self { queue, crew, texts, trouble, ids, killed: None, waited: 0, refused, put_off }
    }

    /// Enqueues the next texts, up to so many in all.
    async fn enqueue(&mut self, up_to: usize) -> Result<()> {
        let texts = &self.texts[self.ids.len()..up_to];
        let jobs: Vec<NewJob> =
            texts.iter().map(|text| NewJob::new(SUMMARIZE, &json!({ "text": text }))).collect::<Result<_, _>>()?;
        let enqueued = self.queue.enqueue_many(&jobs).await?;
        self.ids.extend(enqueued.iter().map(|job| job.id));
        Ok(())
    }

    /// Until every job is final.
    async fn run(&mut self, screen: &mut Screen) -> Result<()> {
        let mut look = interval(LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                news = self.crew.news() => {
                    self.hear(&news, screen);
                    // Where answers come fast, this is the moment at which somebody holds a job.
                    if matches!(&news, News::Said(_, said) if said.event == "started") {
                        self.kill_one(screen).await?;
                    }
                }
                _ = look.tick() => {
                    let counts = Counts::of(&self.queue.health().await?);
                    screen.update(counts, &self.crew.hands);
                    let finals = usize::try_from(counts.done + counts.failed).unwrap_or_default();
                    if finals == self.texts.len() {
                        return Ok(());
                    }
                    self.waited += u32::from(self.may_kill());
                    self.kill_one(screen).await?;
                    // If nobody could be killed all the same, the second wave must not wait for it.
                    if self.ids.len() < self.texts.len() && (self.killed.is_some() || finals == self.ids.len()) {
                        let before = self.ids.len();
                        self.enqueue(self.texts.len()).await?;
                        screen.event(&format!("{} more jobs come in", self.ids.len() - before));
                    }
                    if !self.crew.works() {
                        return Err(Failure::new("no worker is left, and jobs are unfinished"));
                    }
                }
            }
        }
    }

    /// Whether it is time to kill a worker: in the middle, that is after a third of the first wave.
    fn may_kill(&self) -> bool {
        let done: usize = self.crew.hands.iter().map(|hand| hand.done as usize).sum();
        self.killed.is_none() && done >= self.trouble.first_wave / 3
    }

    /// Kills the busiest worker, if it is time and once it is certain that it holds jobs: it is frozen, looked at, and killed
    /// or let go.
    async fn kill_one(&mut self, screen: &Screen) -> Result<()> {
        let wanted = if self.waited < PATIENCE && self.texts.len() >= SHOW_MIN { HOLDS_WANTED } else { 1 };
        let busiest = self.crew.busiest().filter(|(_, holds)| self.may_kill() && *holds >= wanted);
        let Some((number, _)) = busiest else { return Ok(()) };
        let Some(id) = self.crew.hands[number].id.clone() else { return Ok(()) };
        self.crew.freeze(number);
        sleep(SETTLE_DOWN).await;
        let filter = JobFilter { state: Some("running".to_owned()), ..JobFilter::default() };
        let running = self.queue.jobs(&filter, 1_000).await?;
        let holds = |job: &&JobRecord| job.worker.is_some_and(|worker| worker.to_string() == id);
        let mut jobs: Vec<i64> = running.iter().filter(holds).map(|job| job.id).collect();
        if jobs.len() < wanted {
            self.crew.thaw(number);
            return Ok(());
        }
        jobs.sort_unstable();
        self.crew.kill(number);
        let worker = number + 1;
        screen.event(&format!("{BAD}worker {worker} is killed with -9{BAD:#} while it holds {}", named(&jobs)));
        self.killed = Some(Killed { worker, pid: self.crew.hands[number].pid, jobs });
        if !self.crew.works() {
            self.crew.hire()?;
            screen.event("it was the only one; another is started in its place");
        }
        Ok(())
    }

    /// Shows and remembers what the workers say.
    fn hear(&mut self, news: &News, screen: &Screen) {
        match news {
            News::Said(number, said) => self.hear_said(number + 1, said, screen),
            News::Complained(number, line) => {
                screen.event(&format!("{BAD}worker {}:{BAD:#} {}", number + 1, clean(line)));
            }
            News::Ended(number) => {
                if self.killed.as_ref().is_none_or(|killed| killed.worker != number + 1) {
                    screen.event(&format!("{BAD}worker {} ended by itself{BAD:#}", number + 1));
                }
            }
        }
    }

    fn hear_said(&mut self, worker: usize, said: &Said, screen: &Screen) {
        let all_words = said.error.as_deref().or(said.reason.as_deref()).unwrap_or_default();
        let words = screen.words(all_words);
        let again = || format!("{:.1} s", Duration::from_millis(said.delay_ms.unwrap_or_default()).as_secs_f64());
        let Some(job) = said.job else { return };
        match said.event.as_str() {
            "done" => screen.detail(&format!("job {job} {GOOD}done{GOOD:#} by worker {worker}")),
            "started" if said.attempt.is_some_and(|attempt| attempt > 1) => {
                screen.event(&format!("job {job} {HINT}runs again{HINT:#} on worker {worker}"));
            }
            "snoozed" => {
                self.put_off.insert(job);
                // The others were not asked for: their worker had just heard the same.
                if !words.starts_with("not asked") {
                    screen.event(&format!("job {job} {HINT}put off for {}{HINT:#}: {words}", again()));
                    self.refused.insert(job, all_words.to_owned());
                }
            }
            "retry" => screen.event(&format!("job {job} {HINT}retry in {}{HINT:#}: {words}", again())),
            "failed" => screen.event(&format!("job {job} {BAD}failed{BAD:#}: {words}")),
            "lost" | "released" | "cancelled" => screen.event(&format!("job {job} {BAD}{}{BAD:#}", said.event)),
            _ => {}
        }
    }

    /// Lets the workers go and collects all records.
    async fn end(mut self, sim: Option<&Sim>, screen: &mut Screen) -> Result<Played> {
        screen.end();
        let everything = self.queue.jobs(&JobFilter::default(), 100_000).await?;
        let mut places = BTreeMap::new();
        for job in everything {
            *places.entry(job.id).or_insert(0) += 1;
        }
        let mut records = Vec::with_capacity(self.ids.len());
        for id in &self.ids {
            records.push(self.queue.job(*id).await?);
        }
        self.crew.dismiss().await?;
        Ok(Played {
            texts: std::mem::take(&mut self.texts),
            trouble: self.trouble,
            ids: self.ids,
            records,
            places,
            killed: self.killed,
            refused: self.refused,
            put_off: self.put_off,
            stats: sim.map(Sim::stats),
            elapsed: screen.elapsed(),
        })
    }
}
