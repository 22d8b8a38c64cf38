//! Admission of single calls: a handler asks gates before it calls somebody, and goes on with a [`Permit`], or comes back later.
//!
//! A claim has let the job itself through its gates. A handler that makes several calls, or calls what its kind does not name,
//! asks for each call:
//!
//! ```no_run
//! # async fn call(_: &str) -> Result<(String, u64), std::io::Error> { Ok((String::new(), 0)) }
//! # async fn handler(context: posthouse::Context) -> Result<String, posthouse::JobError> {
//! let permit = context.gate("model:gpt-4o").admit(1_200).await?; // about 1,200 tokens, the answer included
//! let (answer, tokens) = call("gpt-4o").await?;
//! permit.used(tokens).await;
//! # Ok(answer) }
//! ```
//!
//! A short wait is waited for. A longer one is an error, and `?` does what is right with it: the attempt ends as a snooze, its slot
//! is free meanwhile, the attempt is not charged, and the job runs again, from its start, when the gate may let it through. So ask
//! before work that should not be done twice. This holds whatever the handler's error type is, and wherever the error is in its
//! chain of causes: see [`NotAdmitted`].

use std::fmt;
use std::time::{Duration, Instant};

use crate::context::Context;
use crate::error::Error;
use crate::outcome::{JobError, Stands};
use crate::pause::Pause;
use crate::signal::Level;
use crate::store::Store;

/// How long a call waits in its handler, unless the handler says otherwise: the pace of a gate that counts requests or tokens
/// is often a second or less away, and a snooze costs a settle and a claim.
const MOMENT: Duration = Duration::from_secs(2);
/// A job is not put off for longer than this without another look, since somebody may open a gate that was closed for good.
const LONGEST: Duration = Duration::from_secs(600);

impl Context {
    /// The gate that calls of this attempt pass: `model:gpt-4o`, or a name without a colon such as `crm`. A gate that nobody has
    /// set lets everything through.
    ///
    /// The name is the gate's, whole: `gpt-4o` would be another gate than `model:gpt-4o`, and is refused where only that one is
    /// known. Gates of queues and tenants hold by themselves.
    pub fn gate(&self, name: impl Into<String>) -> Gate<'_> {
        self.gates([name])
    }

    /// Several gates that a call passes at once: all of them let it through, or none has counted it. Asking one after the other
    /// would hold the first while it waits for the second.
    pub fn gates<I: IntoIterator<Item: Into<String>>>(&self, names: I) -> Gate<'_> {
        Gate { context: self, names: names.into_iter().map(Into::into).collect(), moment: MOMENT }
    }
}

/// Gates that a call is about to pass. Made by [`Context::gate`] and [`Context::gates`].
#[derive(Debug)]
#[must_use = "nothing is asked before `admit`"]
pub struct Gate<'a> {
    context: &'a Context,
    names: Vec<String>,
    moment: Duration,
}

impl Gate<'_> {
    /// How long the call may wait in the handler, which holds its slot meanwhile. Default: 2 seconds. Zero: ask once.
    pub fn within(mut self, moment: Duration) -> Self {
        self.moment = moment;
        self
    }

    /// Asks the gates to let one call through that needs about so many tokens, its answer included; 0 where tokens do not count.
    ///
    /// The request and the tokens are counted at once, and stay counted until [`Permit::used`] says what was really used. Gates
    /// that bound what runs at once count the job, once however many calls it makes, from its first call to the end of the
    /// attempt. Dropping this future may leave a call counted that was not made, never one made that was not counted.
    ///
    /// # Errors
    ///
    /// [`NotAdmitted`]: later, if the gates want a longer wait than [`within`](Self::within), or one beyond the lease or the
    /// deadline of the attempt, or the attempt is asked to stop meanwhile; never, if a name is no gate's or no wait would help.
    /// Where Postgres is away this waits for it, as outcomes do.
    pub async fn admit(self, tokens: u64) -> Result<Permit, NotAdmitted> {
        let Self { context, names, moment } = self;
        match ask(context, &names, moment, tokens).await {
            Ok(asked) => {
                let (store, job, fence) = (context.admit_store().clone(), context.job_id(), context.fence());
                Ok(Permit { store, job, fence, gates: names, reserved: tokens, asked })
            }
            Err(why) => Err(NotAdmitted::new(names, why)),
        }
    }
}

/// Asks until the answer is yes, or worth more than a moment. The answer is when the question was sent to which they said yes.
async fn ask(context: &Context, names: &[String], moment: Duration, tokens: u64) -> Result<Instant, Why> {
    let mut pause = Pause::new(Duration::from_millis(50), Duration::from_secs(1));
    // A moment too long to be represented is ended by the lease or the deadline.
    let until = Instant::now().checked_add(moment);
    loop {
        let sent = Instant::now();
        let answer =
            context.admit_store().admit(context.worker(), context.job_id(), context.fence(), names, tokens).await;
        let (wait, refusal) = match answer {
            Ok(Some(Duration::ZERO)) => return Ok(sent),
            Ok(Some(wait)) => {
                let now = Instant::now();
                let too_long = |at: Option<Instant>| at.is_some_and(|at| wait > at.saturating_duration_since(now));
                if too_long(until) || too_long(context.deadline()) || wait > context.lease_remaining() {
                    return Err(Why::Later(wait));
                }
                // Not all at the same time.
                (wait + wait.mul_f64(fastrand::f64() / 20.0), Why::Later(wait))
            }
            Ok(None) => {
                context.signal().raise(Level::Lost);
                // The handler goes no further than here; tasks that it has spawned get the error.
                tokio::task::yield_now().await;
                return Err(Why::Lost);
            }
            Err(error) if error.is_transient() && !context.lease_remaining().is_zero() => {
                tracing::debug!(%error, job = context.job_id(), "gates not asked; trying again");
                (pause.next(), Why::Failed(error))
            }
            Err(error) if error.is_invalid() => return Err(Why::Never(error)),
            Err(error) => return Err(Why::Failed(error)),
        };
        tokio::select! {
            biased;
            _ = context.signal().above(Level::Run) => {
                // An error that follows is an answer to that.
                context.signal().notice();
                return Err(refusal);
            }
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// A call that gates have let through. Dropped, what was reserved for it stays counted as used.
#[must_use = "say what the call used; dropped, the whole estimate stays counted"]
pub struct Permit {
    store: Store,
    job: i64,
    fence: i64,
    gates: Vec<String>,
    reserved: u64,
    asked: Instant,
}

impl Permit {
    /// The tokens that were reserved.
    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Says how many tokens the call used, so that the gates count those in place of the estimate, in the second in which it was
    /// let through. Zero gives all of them back; the request stays counted. What cannot be written, since Postgres is away, stays
    /// counted as it was reserved: no reason for a handler to fail.
    pub async fn used(self, tokens: u64) {
        let Self { store, job, fence, gates, reserved, asked } = self;
        if tokens == reserved {
            return;
        }
        // Not tried again: if only the answer got lost, it would count twice.
        if let Err(error) = store.admitted(job, fence, &gates, reserved, tokens, asked.elapsed()).await {
            tracing::warn!(%error, ?gates, reserved, used = tokens, "not known to the gates; the estimate stays counted");
        }
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("gates", &self.gates).field("reserved", &self.reserved).finish_non_exhaustive()
    }
}

/// Gates did not let a call through.
///
/// Returned from a handler, with `?` or otherwise, it ends the attempt as fits:
///
/// | why | the attempt ends as |
/// |---|---|
/// | later ([`wait`](Self::wait)) | [`Outcome::Snooze`](crate::Outcome::Snooze), not charged; bounded by the worker's [`max_deferral`](crate::worker::Builder::max_deferral) |
/// | never: a name that is no gate's, more tokens than a gate lets through in a minute | [`Outcome::Fail`](crate::Outcome::Fail): a dead letter, of class `gate` or `too_large` |
/// | Postgres refused, or the attempt is not this worker's any more | as any other error |
///
/// It may be inside of another error: in a [`JobError`], a `Box<dyn Error + Send + Sync>`, an `anyhow::Error` with or without
/// context, a variant of an enum whose `source()` it is. Only turned into text it is a failed attempt like any other. A handler
/// that can do without the call looks at it instead:
///
/// ```no_run
/// # async fn enrich(context: posthouse::Context) -> Result<(), posthouse::JobError> {
/// match context.gate("crm").within(std::time::Duration::ZERO).admit(0).await {
///     Ok(_permit) => { /* call it */ }
///     Err(not) if not.wait().is_some() => { /* do without */ }
///     Err(not) => return Err(not.into()),
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct NotAdmitted {
    gates: Vec<String>,
    wait: Option<Duration>,
    /// What it stands for, as its source: found by its type whatever is wrapped around it.
    cause: Box<Stands>,
}

#[derive(Debug)]
enum Why {
    Later(Duration),
    Never(Error),
    Lost,
    Failed(Error),
}

impl NotAdmitted {
    fn new(gates: Vec<String>, why: Why) -> Self {
        let (wait, error) = match why {
            Why::Later(wait) => {
                let names = gates.join(", ");
                let error = JobError::new("gate", format!("not now, but in {}", shown(wait)));
                // Not all at the same time.
                let delay = wait.max(MOMENT).min(LONGEST).mul_f64(1.0 + fastrand::f64() / 10.0);
                let gate = gates.first().cloned().unwrap_or_default();
                (Some(wait), error.or_snooze(delay, format!("gate {names}: not now, but in {}", shown(wait)), gate))
            }
            Why::Never(error) => {
                let message = error.to_string();
                // The errors of `admit` begin with the field that they are about; the classes are those of claims.
                let class = match message.split(':').next() {
                    Some("tokens") => "too_large",
                    Some("budget") => "budget",
                    _ => "gate",
                };
                (None, JobError::new(class, message).or_fail())
            }
            Why::Lost => (None, JobError::new("gate", "the attempt is not this worker's any more")),
            Why::Failed(error) => (None, JobError::from(error)),
        };
        Self { gates, wait, cause: Box::new(Stands(error)) }
    }

    /// For how long the gates want the call to wait, as far as they know: the time after which to ask again. `None`: it is not a
    /// matter of time.
    pub fn wait(&self) -> Option<Duration> {
        self.wait
    }

    /// The gates that were asked.
    pub fn gates(&self) -> &[String] {
        &self.gates
    }
}

/// A time for people.
fn shown(wait: Duration) -> String {
    if wait < Duration::from_secs(10) {
        format!("{:.1} s", wait.as_secs_f64())
    } else {
        format!("{} s", wait.as_secs())
    }
}

impl fmt::Display for NotAdmitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gate {} did not let the call through", self.gates.join(", "))
    }
}

impl std::error::Error for NotAdmitted {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.cause)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::error::Error as StdError;

    use super::*;
    use crate::outcome::{IntoOutcome, Outcome};

    type Boxed = Box<dyn StdError + Send + Sync>;

    fn later() -> NotAdmitted {
        NotAdmitted::new(vec!["model:m".into(), "crm".into()], Why::Later(Duration::from_secs(90)))
    }

    /// What others wrap around an error: a type that nobody knows, which hands on the source of what is inside, as `anyhow` and
    /// transparent variants do; or one whose source the error is.
    #[derive(Debug)]
    struct Hidden(Boxed);
    #[derive(Debug)]
    struct Around(Boxed);

    impl fmt::Display for Hidden {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.fmt(f)
        }
    }
    impl fmt::Display for Around {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("asking the model")
        }
    }
    impl StdError for Hidden {
        fn source(&self) -> Option<&(dyn StdError + 'static)> {
            self.0.source()
        }
    }
    impl StdError for Around {
        fn source(&self) -> Option<&(dyn StdError + 'static)> {
            Some(&*self.0)
        }
    }

    fn job_error() -> Result<(), JobError> {
        Err(later())?
    }
    fn boxed() -> Result<u8, Boxed> {
        Err(later())?
    }
    fn with_outcome() -> Result<Outcome, Boxed> {
        Err(later())?
    }
    fn hidden() -> Result<(), Hidden> {
        Err(Hidden(later().into()))
    }
    fn around() -> Result<(), Boxed> {
        Err(Around(Hidden(Around(later().into()).into()).into()))?
    }
    fn twice() -> Result<(), Boxed> {
        job_error()?;
        Ok(())
    }

    #[test]
    fn later_is_a_snooze_whatever_is_wrapped_around_it() {
        let outcomes = [
            Err::<(), _>(later()).into_outcome(),
            job_error().into_outcome(),
            boxed().into_outcome(),
            with_outcome().into_outcome(),
            hidden().into_outcome(),
            around().into_outcome(),
            twice().into_outcome(),
            Outcome::retry(later()),
        ];
        for outcome in outcomes {
            let Outcome::Snooze { delay, reason, gate } = outcome else { panic!("{outcome:?}") };
            assert!((90.0..=99.0).contains(&delay.as_secs_f64()), "{delay:?}");
            assert_eq!(reason, "gate model:m, crm: not now, but in 90 s");
            assert_eq!(gate.as_deref(), Some("model:m"));
        }
        let text = Err::<(), _>(later().to_string()).into_outcome();
        assert!(matches!(text, Outcome::Retry { .. }), "{text:?}");
    }

    #[test]
    fn a_snooze_is_neither_in_a_hurry_nor_for_ages() {
        for (wait, least, most) in [(10, 2.0, 2.2), (86_400_000, 600.0, 660.0)] {
            let error = NotAdmitted::new(vec!["crm".into()], Why::Later(Duration::from_millis(wait)));
            assert_eq!(error.wait(), Some(Duration::from_millis(wait)));
            let Outcome::Snooze { delay, .. } = Outcome::retry(error) else { panic!("no snooze") };
            assert!((least..=most).contains(&delay.as_secs_f64()), "{delay:?}");
        }
    }

    #[test]
    fn never_is_a_dead_letter_and_says_why() {
        for (message, class) in [
            ("tokens: 9 is more than gate 'x' lets through", "too_large"),
            ("budget: that of gate 'x' is spent", "budget"),
            ("gates: 'y:z' is no gate's name", "gate"),
        ] {
            let error = NotAdmitted::new(vec!["x".into()], Why::Never(Error::invalid(message)));
            assert_eq!(error.wait(), None);
            let Outcome::Fail(error) = Err::<(), Boxed>(Around(error.into()).into()).into_outcome() else {
                panic!("no end")
            };
            assert_eq!(error.class, class);
            assert_eq!(error.message, format!("asking the model: gate x did not let the call through: {message}"));
        }
    }

    #[test]
    fn other_errors_are_retries_with_their_class_and_all_causes() {
        let lost = NotAdmitted::new(vec!["x".into()], Why::Failed(Error::invalid("down")));
        let Outcome::Retry { error, delay: None } = Err::<(), _>(lost).into_outcome() else { panic!("no retry") };
        assert_eq!(error.message, "gate x did not let the call through: down");
        let detail = serde_json::json!({"status": 500});
        let classed = Err::<(), Boxed>(JobError::new("transient", "no").with_detail(detail.clone()).into());
        let Outcome::Retry { error, .. } = classed.into_outcome() else { panic!("no retry") };
        assert_eq!(error, JobError::new("transient", "no").with_detail(detail));
    }
}
