//! The HTTP side of the simulated provider: connections, routes, and the decision about each request.

use super::answer::{checksum, user_text};
use super::connection::{Player, Tearable};
use super::fault::Fault;
use super::limit::Meter;
use super::reply::{Asked, Frame, Reply, reply, tokens_of};
use super::script::{Script, Step};
use super::stats::Stats;
use crate::millis::millis;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::Instant;

/// Larger requests are refused with 413.
const REQUEST_BYTES_MAX: usize = 64 << 20;

/// State shared by all connections.
pub(crate) struct Shared {
    script: Script,
    /// How often each step has fitted.
    fitted: Vec<AtomicU64>,
    stats: Mutex<Stats>,
    meter: Mutex<Meter>,
    started: Instant,
}

impl Shared {
    pub(crate) fn new(script: Script) -> Self {
        let fitted = script.steps.iter().map(|_| AtomicU64::new(0)).collect();
        Self { script, fitted, stats: Mutex::default(), meter: Mutex::default(), started: Instant::now() }
    }

    pub(crate) fn stats(&self) -> MutexGuard<'_, Stats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The step that decides about a request, if any.
    fn step(&self, number: u64, tries: u64, input: &str, dice: &mut fastrand::Rng) -> Option<&Step> {
        let since_start = self.started.elapsed();
        self.script.steps.iter().zip(&self.fitted).find_map(|(step, fitted)| {
            // The dice is thrown for every step, so that one step's conditions do not change another's luck.
            let luck = dice.f64();
            let fits = step.input.as_ref().is_none_or(|part| input.contains(part.as_str()))
                && step.from.is_none_or(|from| number >= from)
                && step.to.is_none_or(|to| number <= to)
                && step.after.is_none_or(|after| since_start >= after.max)
                && step.before.is_none_or(|before| since_start < before.max)
                && step.tries.is_none_or(|most| tries <= most)
                && step.rate.is_none_or(|rate| luck < rate);
            let one_more = |count: u64| (step.first.is_none_or(|first| count < first)).then_some(count + 1);
            (fits && fitted.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_ok()).then_some(step)
        })
    }
}

impl Shared {
    /// What becomes of a request: what its step says, with the rest of its window for a wait, or what the rate limit says.
    fn limited(&self, mut step: Step, body: &Value, input: &str) -> (Step, Vec<(&'static str, String)>) {
        if matches!(step.fault, Fault::Status(429 | 503 | 529))
            && step.retry_after.is_none()
            && step.retry_after_ms.is_none()
        {
            let rest = step.before.map(|before| before.max.saturating_sub(self.started.elapsed()));
            step.retry_after_ms = rest.map(|rest| millis(rest).max(1));
        }
        let Some(limit) = self.script.limit.as_ref().filter(|_| is_proper(step.fault)) else {
            return (step, Vec::new());
        };
        let mut meter = self.meter.lock().unwrap_or_else(PoisonError::into_inner);
        let verdict = meter.take(limit, tokens_of(&self.script, body, input), Instant::now());
        self.stats().rates = Some(meter.rates);
        if let Some(wait) = verdict.wait {
            step = Step { retry_after_ms: Some(millis(wait).max(1)), ..Step::always(Fault::Status(429)) };
        }
        (step, verdict.headers)
    }
}

/// Whether it is an answer that somebody can use.
fn is_proper(fault: Fault) -> bool {
    matches!(
        fault,
        Fault::Ok
            | Fault::Say
            | Fault::NoStream
            | Fault::NoUsage
            | Fault::Bytewise
            | Fault::ToolCall
            | Fault::Nul
            | Fault::Surrogate
    )
}

/// Takes connections until `stop` changes; open ones end with it.
pub(crate) async fn serve(listener: TcpListener, shared: Arc<Shared>, mut stop: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    tokio::spawn(connection(stream, shared.clone(), stop.clone()));
                }
                // Out of file descriptors, most likely: others will free some.
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(50)).await,
            },
            _ = stop.changed() => return,
        }
    }
}

async fn connection(stream: TcpStream, shared: Arc<Shared>, mut stop: watch::Receiver<bool>) {
    // Small pieces shall leave as they are made, that is the point of a stream.
    let _ = stream.set_nodelay(true);
    let reset = Arc::new(AtomicBool::new(false));
    let io = TokioIo::new(Tearable::new(stream, reset.clone()));
    let service = service_fn(move |request| handle(request, shared.clone(), reset.clone()));
    let served = hyper::server::conn::http1::Builder::new().serve_connection(io, service);
    tokio::select! {
        // A torn or abandoned connection is what this server is for.
        _ = served => {}
        _ = stop.changed() => {}
    }
}

type Answered = io::Result<Response<Player>>;

async fn handle(request: Request<Incoming>, shared: Arc<Shared>, reset: Arc<AtomicBool>) -> Answered {
    let key_fits = shared.script.api_key.as_ref().is_none_or(|key| {
        let sent = request.headers().get("authorization").and_then(|value| value.to_str().ok());
        sent.and_then(|value| value.strip_prefix("Bearer ")) == Some(key.expose())
    });
    match (request.method(), request.uri().path()) {
        (&Method::POST, path) if path.ends_with("/chat/completions") => {
            complete(request, shared, reset, key_fits).await
        }
        (&Method::GET, "/sim/stats") => plain(200, &serde_json::to_value(&*shared.stats()).unwrap_or_default(), reset),
        (&Method::GET, path) if path.ends_with("/models") && key_fits => {
            let names =
                if shared.script.models.is_empty() { vec!["sim".to_owned()] } else { shared.script.models.clone() };
            let data: Vec<Value> = names
                .iter()
                .map(|name| json!({ "id": name, "object": "model", "created": 0, "owned_by": "posthouse" }))
                .collect();
            plain(200, &json!({ "object": "list", "data": data }), reset)
        }
        (&Method::GET, path) if path.ends_with("/models") => {
            plain(401, &error_body("invalid_api_key", "Incorrect API key provided"), reset)
        }
        (method, path) => {
            let message = format!(
                "no {method} {path} here; there are POST /v1/chat/completions, GET /v1/models and GET /sim/stats"
            );
            plain(404, &error_body("not_found", &message), reset)
        }
    }
}

async fn complete(request: Request<Incoming>, shared: Arc<Shared>, reset: Arc<AtomicBool>, key_fits: bool) -> Answered {
    let raw = raw_head(&request);
    let Ok(bytes) = Limited::new(request.into_body(), REQUEST_BYTES_MAX).collect().await else {
        return plain(413, &error_body("request_too_large", "the request could not be read, or is too large"), reset);
    };
    let Ok(body) = serde_json::from_slice::<Value>(&bytes.to_bytes()) else {
        return plain(400, &error_body("invalid_json", "We could not parse the JSON body of your request."), reset);
    };
    let input = user_text(&body);
    let (number, tries) = shared.stats().begin(&input);
    let mut tracked = Tracked { shared: shared.clone(), key: checksum(&input), proper: false, ended: false };
    let seed = input
        .bytes()
        .chain(tries.to_le_bytes())
        .fold(shared.script.seed, |seed, byte| (seed ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3).rotate_left(7));
    let mut dice = fastrand::Rng::with_seed(seed);
    let model = body["model"].as_str().unwrap_or("");
    let known = shared.script.models.is_empty() || shared.script.models.iter().any(|name| name == model);
    let fixed = if !key_fits {
        Step::always(Fault::Status(401))
    } else if !known {
        Step::always(Fault::ModelNotFound)
    } else {
        shared.step(number, tries, &input, &mut dice).cloned().unwrap_or(Step::always(Fault::Ok))
    };
    let (fixed, rates) = shared.limited(fixed, &body, &input);
    let outcome = fixed.fault.to_string();
    shared.stats().decide(number, model, &input, body["stream"] == true, &outcome);
    tracing::debug!(number, outcome, "simulated request");
    tracked.proper = is_proper(fixed.fault);
    let mut reply = reply(&shared.script, &fixed, &Asked { number, body: &body, input: &input, raw: &raw }, &mut dice);
    reply.headers.extend(rates);
    play(reply, reset, tracked).await
}

async fn play(reply: Reply, reset: Arc<AtomicBool>, mut tracked: Tracked) -> Answered {
    match reply.delay {
        Some(delay) => tokio::time::sleep(delay).await,
        None => std::future::pending().await,
    }
    if reply.reset {
        reset.store(true, Ordering::Release);
        return Err(io::Error::other("torn by the script"));
    }
    let mut response = Response::builder().status(reply.status);
    for (name, value) in &reply.headers {
        response = response.header(*name, value);
    }
    let on_end = Box::new(move |finished| tracked.end(finished));
    response.body(Player::new(reply.frames, reset, on_end)).map_err(io::Error::other)
}

/// Counts a request out, however it ends.
struct Tracked {
    shared: Arc<Shared>,
    key: String,
    proper: bool,
    ended: bool,
}

impl Tracked {
    fn end(&mut self, finished: bool) {
        if !std::mem::replace(&mut self.ended, true) {
            self.shared.stats().end(&self.key, finished, self.proper);
        }
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.end(false);
    }
}

fn plain(status: u16, body: &Value, reset: Arc<AtomicBool>) -> Answered {
    let frames = vec![Frame::Data(body.to_string().into())];
    let response = Response::builder().status(status).header("content-type", "application/json");
    response.body(Player::new(frames, reset, Box::new(|_| {}))).map_err(io::Error::other)
}

fn error_body(code: &str, message: &str) -> Value {
    json!({ "error": { "message": message, "type": "invalid_request_error", "param": null, "code": code } })
}

/// Request line and headers as text, for `echo`.
fn raw_head(request: &Request<Incoming>) -> String {
    let headers =
        request.headers().iter().map(|(name, value)| format!("{name}: {}", String::from_utf8_lossy(value.as_bytes())));
    std::iter::once(format!("{} {}", request.method(), request.uri())).chain(headers).collect::<Vec<_>>().join("\n")
}
