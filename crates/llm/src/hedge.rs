//! Two calls side by side: who begins to answer first is heard out, the other is cut off.

use crate::answer::Answer;
use crate::error::CallError;
use std::pin::Pin;
use tokio::sync::Notify;

/// Boxed, since it is handed through many hands, and none of them shall hold room for it while the call lasts.
type Outcome = Result<Box<Answer>, Box<CallError>>;

/// How a race ended.
#[derive(Debug)]
pub(crate) enum Winner {
    /// The first was heard, the second cut off.
    First(Outcome),
    /// The second was heard, the first cut off.
    Second(Outcome),
    /// One failed, and the other was heard after that.
    Both(Outcome, Outcome),
}

/// Runs two calls until one begins to answer, or fails so that the other cannot do better (`is_final`). Dropping a call closes
/// its connection.
pub(crate) async fn race<F: Future<Output = Outcome>, S: Future<Output = Outcome>>(
    (mut first, first_begun): (Pin<Box<F>>, &Notify),
    (mut second, second_begun): (Pin<Box<S>>, &Notify),
    is_final: impl Fn(&CallError) -> bool,
) -> Winner {
    tokio::select! {
        biased;
        outcome = &mut first => match outcome {
            Err(error) if !is_final(&error) => Winner::Both(Err(error), second.await),
            outcome => Winner::First(outcome),
        },
        outcome = &mut second => match outcome {
            Err(error) if !is_final(&error) => Winner::Both(first.await, Err(error)),
            outcome => Winner::Second(outcome),
        },
        () = first_begun.notified() => {
            drop(second);
            Winner::First(first.await)
        }
        () = second_begun.notified() => {
            drop(first);
            Winner::Second(second.await)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorClass;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;
    use tokio::time::sleep;

    /// Says when it was dropped.
    struct Dropped<'a>(&'a AtomicBool);
    impl Drop for Dropped<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    fn failed(class: ErrorClass, name: &str) -> Outcome {
        Err(CallError::new(class, name, "it failed"))
    }

    fn code(outcome: &Outcome) -> &str {
        outcome.as_ref().err().map_or("", |error| &error.code)
    }

    /// A call that begins and ends after so many milliseconds.
    async fn call(begun: &Notify, begins: u64, ends: u64, outcome: Outcome) -> Outcome {
        sleep(Duration::from_millis(begins)).await;
        if begins < ends {
            begun.notify_one();
            sleep(Duration::from_millis(ends - begins)).await;
        }
        outcome
    }

    async fn raced(first: (u64, u64, ErrorClass), second: (u64, u64, ErrorClass)) -> (Winner, bool) {
        let (begun, cut) = ([Notify::new(), Notify::new()], AtomicBool::new(false));
        let one = Box::pin(call(&begun[0], first.0, first.1, failed(first.2, "one")));
        let two = Box::pin(async {
            let _dropped = Dropped(&cut);
            call(&begun[1], second.0, second.1, failed(second.2, "two")).await
        });
        let winner = race((one, &begun[0]), (two, &begun[1]), |error| error.class == ErrorClass::Terminal).await;
        (winner, cut.load(Ordering::Relaxed))
    }

    #[tokio::test(start_paused = true)]
    async fn who_begins_first_is_heard_out() {
        use ErrorClass::{Incomplete, NotNow, Terminal};
        let (winner, cut) = raced((10, 1_000, Incomplete), (20, 30, Incomplete)).await;
        assert!(matches!(&winner, Winner::First(outcome) if code(outcome) == "one") && cut, "{winner:?}");
        let (winner, _) = raced((20, 30, Incomplete), (10, 1_000, Incomplete)).await;
        assert!(matches!(&winner, Winner::Second(outcome) if code(outcome) == "two"), "{winner:?}");
        let (winner, _) = raced((10, 10, NotNow), (20, 30, Incomplete)).await;
        assert!(matches!(&winner, Winner::Both(one, two) if (code(one), code(two)) == ("one", "two")), "{winner:?}");
        let (winner, cut) = raced((10, 10, Terminal), (20, 30, Incomplete)).await;
        assert!(matches!(&winner, Winner::First(outcome) if code(outcome) == "one") && cut, "{winner:?}");
    }
}
