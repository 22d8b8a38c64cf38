//! One attempt of one job, from the claim to an outcome that is on its way to Postgres.
//!
//! ```text
//! claimed ──► start ──► running ──► the handler returns ──────────────► done, retry, snooze, fail, cancelled
//!               │          ├─ it panics, or takes too long ────────────► retry
//!               │          ├─ somebody cancels ── 5 s ─────────────────► cancelled, whatever it returns
//!               │          ├─ the worker shuts down ── grace period ───► release (uncharged), unless it finishes
//!               │          └─ the lease or the job is lost ────────────► nothing is written
//!               └─ the payload does not fit ───────────────────────────► retry
//! ```
//!
//! The handler runs inside this task, so that dropping it is enough to stop it. Before each step the lease is looked at:
//! a process that slept past it does not take one step more.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use serde_json::value::RawValue;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep, sleep_until};
use tracing::Instrument;

use crate::context::Context;
use crate::event::Event;
use crate::handler::{Handler, Running};
use crate::outcome::{JobError, Outcome};
use crate::signal::Level;
use crate::store::Settlement;
use crate::trace;
use crate::worker::shared::{Filed, Incarnation, Shared, Slip};

/// How long a handler may take to return after its job was cancelled: time to close files and say goodbye, short enough
/// for the person who waits for it.
const CANCEL_GRACE: Duration = Duration::from_secs(5);

/// A job that was claimed, with all that belongs to its attempt.
pub(crate) struct Claimed {
    pub(crate) context: Context,
    pub(crate) payload: Box<RawValue>,
    pub(crate) incarnation: Arc<Incarnation>,
    pub(crate) slot: OwnedSemaphorePermit,
    pub(crate) room: OwnedSemaphorePermit,
}

/// How an attempt ended.
#[derive(Debug)]
enum Ending {
    /// With an outcome.
    Decided(Outcome),
    /// Unfinished; somebody else shall have it, uncharged.
    Release,
    /// It is not ours any more.
    Lost,
}

/// What one step of the handler came to.
enum Step {
    Returned(Outcome),
    Panicked(Box<dyn Any + Send>),
    LeaseOver,
}

/// Runs the job and files its outcome.
pub(crate) async fn attempt(shared: Arc<Shared>, claimed: Claimed) {
    let Claimed { context, payload, incarnation, slot, room } = claimed;
    shared.emit_of(&context, &Event::Started { job: context.job() });
    let span = tracing::info_span!(
        "attempt",
        job = context.job_id(),
        kind = context.kind(),
        queue = context.queue(),
        tenant = context.tenant(),
        attempt = context.attempt()
    );
    let traced = trace::processing(context.job(), context.worker());
    let began = Instant::now();
    let ending = match shared.handlers.get(context.kind()) {
        Some(handler) if traced.is_on() => traced.around(run(handler, &context, payload).instrument(span)).await,
        Some(handler) => run(handler, &context, payload).instrument(span).await,
        None => Ending::Decided(failed(JobError::new("kind", format!("no handler for kind `{}`", context.kind())))),
    };
    let took = began.elapsed();
    context.set_took(took);
    shared.metered(|meter| meter.ran(context.job(), took));
    drop(slot);
    match &ending {
        Ending::Decided(outcome) => trace::processed(traced, Some(outcome), ""),
        Ending::Release => trace::processed(traced, None, "release"),
        Ending::Lost => trace::processed(traced, None, "lost"),
    }
    let (id, fence) = (context.job_id(), context.fence());
    let mut settlement = match ending {
        Ending::Decided(outcome) => Settlement::new(id, fence, with_delay(outcome, &shared, &context)),
        Ending::Release => Settlement::release(id, fence),
        Ending::Lost => {
            incarnation.ledger().let_go(id, fence);
            return shared.emit_of(&context, &Event::Lost { job: context.job() });
        }
    };
    settlement.usage = context.take_usage();
    settlement.max_deferral = shared.settings.max_deferral;
    let slip = Slip { incarnation, context, room };
    if shared.filed.send(Filed { slip, settlement }).is_err() {
        tracing::warn!(job = id, "the handler ended after the worker: its outcome is dropped and the job runs again");
    }
}

/// From the payload to the ending. The handler is dropped before this returns.
async fn run(handler: &Handler, context: &Context, payload: Box<RawValue>) -> Ending {
    if context.lease().is_over(std::time::Instant::now()) {
        return Ending::Lost;
    }
    let started = catch_unwind(AssertUnwindSafe(|| handler.start(payload, context.clone())));
    let mut work = match started {
        Ok(Ok(work)) => work,
        Ok(Err(error)) => return Ending::Decided(failed(error)),
        Err(panic) => return Ending::Decided(failed(panicked(&*panic))),
    };
    let ending = drive(&mut work, context).await;
    // A destructor that panics must not take the ending with it.
    if catch_unwind(AssertUnwindSafe(|| drop(work))).is_err() {
        tracing::warn!(job = context.job_id(), kind = context.kind(), "the handler panicked while it was dropped");
    }
    ending
}

/// Lets the handler run until it ends or has to.
async fn drive(work: &mut Running, context: &Context) -> Ending {
    let deadline = context.deadline().map(Instant::from_std);
    let mut told = Level::Run;
    let mut cancelled = false;
    // One timer for whatever comes first, none for a job without a timeout.
    let mut alarm: Option<Pin<Box<Sleep>>> = deadline.map(|at| Box::pin(sleep_until(at)));
    loop {
        tokio::select! {
            biased;
            level = context.signal().above(told) => {
                told = level;
                match level {
                    Level::Run | Level::Shutdown | Level::Timeout => {}
                    Level::Cancel => {
                        cancelled = true;
                        let by = Instant::now() + CANCEL_GRACE;
                        alarm = Some(Box::pin(sleep_until(deadline.map_or(by, |deadline| deadline.min(by)))));
                    }
                    Level::Release if cancelled => return Ending::Decided(Outcome::Cancelled),
                    Level::Release => return Ending::Release,
                    Level::Lost => return Ending::Lost,
                }
            }
            step = step(work, context) => return match step {
                Step::LeaseOver => Ending::Lost,
                _ if cancelled => Ending::Decided(Outcome::Cancelled),
                Step::Panicked(panic) => Ending::Decided(failed(panicked(&*panic))),
                Step::Returned(outcome) => returned(outcome, context),
            },
            () = ring(&mut alarm) => {
                if cancelled {
                    return Ending::Decided(Outcome::Cancelled);
                }
                context.signal().raise(Level::Timeout);
                return Ending::Decided(failed(timed_out(context)));
            }
        }
    }
}

/// One step of the handler, unless the lease is over.
async fn step(work: &mut Running, context: &Context) -> Step {
    std::future::poll_fn(|cx| {
        if context.lease().is_over(std::time::Instant::now()) {
            return Poll::Ready(Step::LeaseOver);
        }
        match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(cx))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(outcome)) => Poll::Ready(Step::Returned(outcome)),
            Err(panic) => Poll::Ready(Step::Panicked(panic)),
        }
    })
    .await
}

async fn ring(alarm: &mut Option<Pin<Box<Sleep>>>) {
    match alarm {
        Some(alarm) => alarm.await,
        None => std::future::pending().await,
    }
}

/// The handler returned. An error that answers the shutdown is no failure of the job.
fn returned(outcome: Outcome, context: &Context) -> Ending {
    let shutting_down = matches!(context.signal().level(), Level::Shutdown | Level::Release);
    match outcome {
        Outcome::Retry { .. } if shutting_down && context.signal().was_noticed() => Ending::Release,
        outcome => Ending::Decided(outcome),
    }
}

fn failed(error: JobError) -> Outcome {
    Outcome::Retry { error, delay: None }
}

fn timed_out(context: &Context) -> JobError {
    let timeout = context.job().timeout.unwrap_or_default();
    JobError::new("timeout", format!("the attempt took longer than its timeout of {timeout:?}"))
}

fn panicked(panic: &(dyn Any + Send)) -> JobError {
    let message = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "the handler panicked without a message".to_owned());
    JobError::new("panic", message)
}

/// Fills in the wait that the handler left to the backoff of its kind.
fn with_delay(outcome: Outcome, shared: &Shared, context: &Context) -> Outcome {
    match outcome {
        Outcome::Retry { error, delay: None } => {
            let backoff = shared.handlers.get(context.kind()).map(Handler::backoff).unwrap_or_default();
            Outcome::Retry { error, delay: Some(backoff.delay(context.attempt(), fastrand::f64())) }
        }
        outcome => outcome,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::SystemTime;

    use serde::{Deserialize, Serialize};
    use uuid::Uuid;

    use super::*;
    use crate::context::CancelReason;
    use crate::job::Job;
    use crate::lease::Lease;
    use crate::outcome::IntoOutcome;
    use crate::store::{ClaimedJob, Database};

    /// True once its owner was dropped.
    #[derive(Clone, Default)]
    struct Dropped(Arc<AtomicBool>);

    struct Guard(Dropped);

    impl Dropped {
        fn is(&self) -> bool {
            self.0.load(Ordering::SeqCst)
        }
    }

    impl Drop for Guard {
        fn drop(&mut self) {
            self.0.0.store(true, Ordering::SeqCst);
        }
    }

    fn raw(json: &str) -> Box<RawValue> {
        RawValue::from_string(json.to_owned()).unwrap()
    }

    fn context_with(timeout: Option<Duration>, lease: Duration) -> Context {
        let job = ClaimedJob {
            id: 7,
            fence: 1,
            attempt: 1,
            max_attempts: 5,
            kind: "k".into(),
            queue: "default".into(),
            tenant: "default".into(),
            priority: 0,
            payload: raw("null"),
            timeout,
            lane: 1,
            enqueued_at: SystemTime::UNIX_EPOCH,
            trace: None,
            model: None,
        };
        let store = Database::new("postgres://localhost/nowhere").unwrap().store("test");
        let lease = Arc::new(Lease::new(lease, std::time::Instant::now()));
        Context::new(job, Uuid::new_v4(), lease, (store.clone(), store), Instant::now().into_std())
    }

    fn context() -> Context {
        context_with(None, Duration::from_secs(3_600))
    }

    fn handler<F, Fut>(handler: F) -> Handler
    where
        F: Fn(Context) -> Fut + Send + Sync + 'static,
        Fut: Future<Output: IntoOutcome> + Send + 'static,
    {
        Handler::raw(move |_, context| handler(context))
    }

    /// A handler that never ends, and whether it was dropped.
    fn endless() -> (Handler, Dropped) {
        let dropped = Dropped::default();
        let seen = dropped.clone();
        let endless = handler(move |_| {
            let guard = Guard(seen.clone());
            async move {
                let _guard = guard;
                std::future::pending::<()>().await;
            }
        });
        (endless, dropped)
    }

    fn retried(ending: Ending) -> JobError {
        match ending {
            Ending::Decided(Outcome::Retry { error, .. }) => error,
            other => panic!("expected a retry, got {other:?}"),
        }
    }

    #[tokio::test]
    async fn what_the_handler_returns_is_the_outcome() {
        let ending = run(&handler(|_| async { Outcome::done(&"yes") }), &context(), raw("{}")).await;
        assert!(matches!(ending, Ending::Decided(Outcome::Done(result)) if result.get() == "\"yes\""));
        let ending = run(&handler(|_| async { Err::<(), _>(JobError::new("x", "no")) }), &context(), raw("{}")).await;
        assert_eq!(retried(ending), JobError::new("x", "no"));
    }

    #[tokio::test]
    async fn a_payload_that_does_not_fit_is_an_error_of_its_own_class() {
        #[derive(Serialize, Deserialize)]
        struct Text {
            text: String,
        }
        impl Job for Text {
            const KIND: &'static str = "k";
        }
        let typed = Handler::typed(|job: Text, _| async move { Outcome::done(&job.text) });
        for bad in ["{}", "[1]", "null", r#"{"text":1}"#] {
            let error = retried(run(&typed, &context(), raw(bad)).await);
            assert_eq!(error.class, "payload");
            assert!(error.message.contains("kind `k`"), "{error}");
        }
        let ending = run(&typed, &context(), raw(r#"{"text":"a"}"#)).await;
        assert!(matches!(ending, Ending::Decided(Outcome::Done(_))));
    }

    #[tokio::test]
    async fn a_panic_is_an_error_with_its_message() {
        let early = Handler::raw(|_, _| -> std::future::Ready<()> { panic!("before {}", "the future") });
        let error = retried(run(&early, &context(), raw("{}")).await);
        assert_eq!((error.class.as_str(), error.message.as_str()), ("panic", "before the future"));
        let late = handler(|_| async {
            tokio::task::yield_now().await;
            panic!("inside");
            #[allow(unreachable_code)]
            ()
        });
        let error = retried(run(&late, &context(), raw("{}")).await);
        assert_eq!((error.class.as_str(), error.message.as_str()), ("panic", "inside"));
    }

    #[tokio::test]
    async fn a_destructor_that_panics_does_not_take_the_ending_with_it() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("in drop");
            }
        }
        let context = context();
        let work = handler(|_| async {
            let _bomb = Bomb;
            std::future::pending::<()>().await;
        });
        let running = run(&work, &context, raw("{}"));
        tokio::pin!(running);
        // The bomb is armed by the first step.
        assert!(futures_util::poll!(&mut running).is_pending());
        context.signal().raise(Level::Release);
        assert!(matches!(running.await, Ending::Release));
    }

    #[tokio::test(start_paused = true)]
    async fn a_timeout_drops_the_handler_and_is_a_retry() {
        let (work, dropped) = endless();
        let context = context_with(Some(Duration::from_secs(90)), Duration::from_secs(3_600));
        let began = Instant::now();
        let error = retried(run(&work, &context, raw("{}")).await);
        assert_eq!(error.class, "timeout");
        assert!(error.message.contains("90s"), "{error}");
        assert!(dropped.is());
        assert!((90..91).contains(&began.elapsed().as_secs()));
        assert_eq!(context.cancel_reason(), Some(CancelReason::Timeout));
    }

    #[tokio::test(start_paused = true)]
    async fn a_timeout_of_ages_does_not_fire_at_once() {
        for timeout in [Duration::from_secs(86_400 * 365 * 10), Duration::MAX] {
            let context = context_with(Some(timeout), Duration::from_secs(3_600));
            let work = handler(|_| async {
                // Longer than the longest sleep of the runtime, which is a bit over two years.
                for _ in 0..40 {
                    tokio::time::sleep(Duration::from_secs(86_400 * 30)).await;
                }
            });
            let ending = run(&work, &context, raw("{}")).await;
            assert!(matches!(ending, Ending::Decided(Outcome::Done(_))), "{ending:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_job_is_cancelled_whatever_its_handler_does() {
        let deaf = handler(|_| std::future::pending::<()>());
        let polite = handler(|context| async move {
            assert_eq!(context.cancelled().await, CancelReason::User);
            Outcome::done(&"finished after all")
        });
        for (work, seconds) in [(deaf, CANCEL_GRACE.as_secs()), (polite, 0)] {
            let context = context();
            let began = Instant::now();
            let running = run(&work, &context, raw("{}"));
            tokio::pin!(running);
            assert!(futures_util::poll!(&mut running).is_pending());
            context.signal().raise(Level::Cancel);
            assert!(matches!(running.await, Ending::Decided(Outcome::Cancelled)));
            assert_eq!(began.elapsed().as_secs(), seconds);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_shutdown_lets_the_handler_finish_and_then_releases_it() {
        let finishes = handler(|_| async {
            tokio::time::sleep(Duration::from_secs(3)).await;
            Outcome::done(&1)
        });
        let context_1 = context();
        context_1.signal().raise(Level::Shutdown);
        assert!(matches!(run(&finishes, &context_1, raw("{}")).await, Ending::Decided(Outcome::Done(_))));

        let (endless, dropped) = endless();
        let context_2 = context();
        let running = run(&endless, &context_2, raw("{}"));
        tokio::pin!(running);
        assert!(futures_util::poll!(&mut running).is_pending());
        context_2.signal().raise(Level::Shutdown);
        assert!(futures_util::poll!(&mut running).is_pending());
        context_2.signal().raise(Level::Release);
        assert!(matches!(running.await, Ending::Release));
        assert!(dropped.is());
    }

    #[tokio::test]
    async fn an_error_that_answers_the_shutdown_is_a_release_and_any_other_is_not() {
        let answers = handler(|context| async move {
            assert_eq!(context.cancelled().await, CancelReason::Shutdown);
            Err::<(), _>(JobError::new("error", "interrupted"))
        });
        let fails = handler(|_| async { Err::<(), _>(JobError::new("error", "really")) });
        let (context_1, context_2) = (context(), context());
        context_1.signal().raise(Level::Shutdown);
        context_2.signal().raise(Level::Shutdown);
        assert!(matches!(run(&answers, &context_1, raw("{}")).await, Ending::Release));
        assert_eq!(retried(run(&fails, &context_2, raw("{}")).await).message, "really");
    }

    #[tokio::test]
    async fn a_lost_job_stops_at_once() {
        let context = context();
        let (work, dropped) = endless();
        let running = run(&work, &context, raw("{}"));
        tokio::pin!(running);
        assert!(futures_util::poll!(&mut running).is_pending());
        context.signal().raise(Level::Lost);
        assert!(matches!(running.await, Ending::Lost));
        assert!(dropped.is());
    }

    #[tokio::test]
    async fn past_the_lease_not_one_step_is_taken() {
        let steps = Arc::new(AtomicBool::new(false));
        let seen = steps.clone();
        let work = handler(move |_| {
            let seen = seen.clone();
            async move { seen.store(true, Ordering::SeqCst) }
        });
        let over = context_with(None, Duration::ZERO);
        assert!(matches!(run(&work, &over, raw("{}")).await, Ending::Lost));
        let mut running = work.start(raw("{}"), over.clone()).unwrap();
        assert!(matches!(step(&mut running, &over).await, Step::LeaseOver));
        assert!(!steps.load(Ordering::SeqCst));
    }
}
