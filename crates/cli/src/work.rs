//! `posthouse work`: a worker made of prompt kinds and commands. Tells one line a transition.

mod known;
mod line;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use posthouse::Worker;
use posthouse::store::{Database, WEBHOOK_KIND, WEBHOOK_QUEUE};
use posthouse::sweep::Sweeper;
use posthouse::worker::Builder;
use posthouse_llm::{Config, ConfigError, Engine};

use crate::args::{ExecKind, Global, STOP_AT_EOF, Work};
use crate::failure::{Failure, Result};
use crate::metrics::Server;
use crate::{alert, connect, exec, log};

/// The configuration that is read when none is named.
const CONFIG: &str = "posthouse.toml";
/// As the help says.
const CONCURRENCY: u32 = 100;
const LEASE_MS: u64 = 30_000;

/// Says which kinds need no payload any more when a job has ended.
async fn drop_payloads(database: &Database, kinds: &[String]) -> Result<()> {
    let store = database.store("setup");
    for kind in kinds {
        store.set_drop_payload(kind, true).await?;
    }
    Ok(())
}

/// Runs until it is told to end, or until there is nothing left to do.
pub(crate) async fn run(args: Work, global: &Global) -> Result<ExitCode> {
    if std::env::var_os(STOP_AT_EOF).is_some() {
        stop_at_eof()?;
    }
    let database = database(&args, global)?;
    if args.sweep_only {
        return sweep_only(database, &args, global).await;
    }
    let engine = engine(&args)?;
    let alerts = alert::Setup::load(config_file(&args).as_deref(), &database)?;
    let delivers = alerts.as_ref().is_some_and(alert::Setup::has_webhook);
    let kinds = kinds(engine.as_ref(), delivers, &args.execs)?;
    let queues = queues(&args, delivers);

    if engine.is_some() {
        allow_connections(args.concurrency.unwrap_or(CONCURRENCY), global);
    }
    let known = known::Known::load(engine, config_file(&args))?;
    let json = log::is_json(global);
    let opening = line::Opening {
        queues: queues.clone(),
        kinds,
        concurrency: args.concurrency.unwrap_or(CONCURRENCY),
        lease_ms: args.lease_ms.unwrap_or(LEASE_MS),
    };
    print(&if json { opening.to_json() } else { opening.to_string() });
    let server = metrics(&args, &database, global, true).await?;
    let engine = known.tell(&database, global).await?;
    drop_payloads(&database, &args.drop_payloads).await?;
    if let (Some(server), Some(engine)) = (&server, &engine) {
        server.add(engine.clone());
    }
    let mut builder = builder(&args, engine, database).queues(&queues);
    if let Some(alerts) = alerts {
        builder = alerts.register(builder);
        alerts.tell();
    }
    if let Some(server) = &server {
        builder = server.watch(builder);
    }
    let told = builder.run().await;
    // What is still being ended would otherwise be left to the watchdog.
    exec::wait_for_endings();
    let summary = told?;
    print(&if json { line::end_json(&summary) } else { line::end_text(&summary) });
    Ok(ExitCode::SUCCESS)
}

/// Housekeeping and nothing else, until it is told to end.
async fn sweep_only(database: Database, args: &Work, global: &Global) -> Result<ExitCode> {
    print(&if log::is_json(global) { line::sweeping_json() } else { line::sweeping_text() });
    let server = metrics(args, &database, global, false).await?;
    let sweeper = Sweeper::new(database);
    server.iter().fold(sweeper, |sweeper, server| server.watch_sweeper(sweeper)).run().await?;
    Ok(ExitCode::SUCCESS)
}

/// Serves metrics, where that is asked for.
async fn metrics(args: &Work, database: &Database, global: &Global, works: bool) -> Result<Option<Server>> {
    let server = Server::start(args.metrics_listen, database, works).await?;
    if let Some(url) = server.as_ref().map(Server::url) {
        print(&if log::is_json(global) { line::metrics_json(&url) } else { line::metrics_text(&url) });
    }
    Ok(server)
}

fn database(args: &Work, global: &Global) -> Result<Database> {
    let database = connect::database(global)?;
    Ok(match &args.listen_url {
        Some(url) => database.listen_url(Some(url))?,
        None if args.no_listen => database.listen_url(None)?,
        None => database,
    })
}

/// What runs prompt kinds; `None` if nothing says where a model is to be found.
fn engine(args: &Work) -> Result<Option<Engine>> {
    let failure = |error: ConfigError| Failure::new(error.to_string());
    let config = match (&args.provider_url, &args.model) {
        (Some(_), _) if args.config.is_some() => {
            return Err(Failure::usage("--config and --provider-url both say which provider to use; keep one"));
        }
        (Some(url), Some(model)) => Config::single(url, model, Config::key_from_environment()),
        (Some(_), None) => {
            return Err(Failure::usage("--provider-url needs to know which model to ask for").hint("add --model NAME"));
        }
        (None, _) => {
            let Some(file) = config_file(args) else { return Ok(None) };
            let config = Config::load(&file).map_err(failure)?;
            if config.asks_nobody() {
                return Ok(None);
            }
            let engine = Engine::from_config(&config);
            return engine.map(Some).map_err(|error| Failure::new(format!("{}: {error}", file.display())));
        }
    };
    config.and_then(|config| Engine::from_config(&config)).map(Some).map_err(failure)
}

/// The configuration, if one is to be read.
fn config_file(args: &Work) -> Option<PathBuf> {
    if args.provider_url.is_some() {
        return None;
    }
    args.config.clone().or_else(|| Some(Path::new(CONFIG)).filter(|file| file.exists()).map(Path::to_path_buf))
}

/// The queues that will be served.
fn queues(args: &Work, delivers: bool) -> Vec<String> {
    let mut queues = args.queues.clone();
    if queues.is_empty() {
        queues.push("default".to_owned());
    }
    if delivers && !queues.iter().any(|queue| queue == WEBHOOK_QUEUE) {
        queues.push(WEBHOOK_QUEUE.to_owned());
    }
    queues
}

/// The kinds that will be served, sorted.
fn kinds(engine: Option<&Engine>, delivers: bool, execs: &[ExecKind]) -> Result<Vec<String>> {
    let mut kinds: Vec<String> = engine.map(Engine::kinds).unwrap_or_default();
    kinds.extend(delivers.then(|| WEBHOOK_KIND.to_owned()));
    for exec in execs {
        if kinds.contains(&exec.kind) {
            return Err(Failure::usage(format!("--exec {}: this kind has a handler already; keep one", exec.kind)));
        }
        kinds.push(exec.kind.clone());
    }
    if kinds.is_empty() {
        return Err(Failure::usage("this worker would serve no kind of job, so it would never do anything").hint(
            "run a command for each job of a kind:  posthouse work --exec KIND='command'\n\
             run prompts with a model:              posthouse work --provider-url http://127.0.0.1:11434/v1 --model llama3.2\n\
             or name providers and prompt kinds in ./posthouse.toml, or in another file with --config",
        ));
    }
    kinds.sort_unstable();
    Ok(kinds)
}

fn builder(args: &Work, engine: Option<Engine>, database: Database) -> Builder {
    let mut builder = Worker::builder(database)
        .queues(&args.queues)
        .concurrency(args.concurrency.unwrap_or(CONCURRENCY))
        .lease(Duration::from_millis(args.lease_ms.unwrap_or(LEASE_MS)))
        .until_empty(args.until_empty);
    if let Some(poll) = args.poll_ms {
        builder = builder.poll(Duration::from_millis(poll));
    }
    if let Some(grace) = args.grace_ms {
        builder = builder.grace(Duration::from_millis(grace));
    }
    if args.no_sweep {
        builder = builder.no_sweep();
    }
    if let Some(engine) = engine {
        builder = engine.register(builder);
    }
    for ExecKind { kind, command } in &args.execs {
        let command: std::sync::Arc<str> = command.as_str().into();
        builder = builder.handle_kind(kind, move |payload, context| exec::attempt(command.clone(), payload, context));
    }
    builder
}

/// Many systems allow a process 1,024 open files unless it asks for more; a thousand calls at once need that many
/// for their connections alone. Where it may not have more, calls that find none left wait, uncharged.
fn allow_connections(concurrency: u32, global: &Global) {
    /// For everything that is no call: Postgres, programs, libraries.
    const OTHERS: u64 = 200;
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return };
    let wanted = u64::from(concurrency) + OTHERS;
    let allowed = wanted.min(hard);
    if soft < wanted && (setrlimit(Resource::RLIMIT_NOFILE, allowed, hard).is_err() || allowed < wanted) {
        let text = format!(
            "{concurrency} calls at once may need {wanted} open files, more than this process may have; \
             some will wait: lower --concurrency, or raise the limit (ulimit -Hn)"
        );
        log::say(global, text);
    }
}

/// A line on standard output. When nobody reads it any more, the work goes on all the same.
fn print(line: &str) {
    writeln!(anstream::stdout().lock(), "{line}").ok();
}

/// Ends the process when standard input ends. Whom it works for is gone then, and the database with it.
fn stop_at_eof() -> Result<()> {
    let wait = || {
        let mut input = std::io::stdin().lock();
        let mut bytes = [0; 64];
        while matches!(input.read(&mut bytes), Ok(1..)) {}
        std::process::exit(1);
    };
    std::thread::Builder::new().name("posthouse-eof".to_owned()).spawn(wait)?;
    Ok(())
}
