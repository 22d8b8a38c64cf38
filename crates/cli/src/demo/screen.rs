//! What one sees while the demo runs: on a terminal events that scroll by above some lines that are redrawn, elsewhere plain
//! lines. On stdout, or on stderr when stdout is for a program.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use posthouse::store::QueueHealth;

use super::crew::{Hand, State};
use crate::style::{BAD, BOLD, DIM, GOOD, HINT, clean};

/// Redraws a second: calm, and quick enough to look alive.
const REDRAWS_PER_SECOND: u8 = 10;

/// Where nothing is redrawn the counts are told this often.
const PLAIN_EVERY: Duration = Duration::from_secs(1);

/// How many jobs are where.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) due: i64,
    pub(super) later: i64,
    pub(super) running: i64,
    pub(super) done: i64,
    pub(super) failed: i64,
}

impl Counts {
    pub(super) fn of(health: &[QueueHealth]) -> Self {
        health.iter().fold(Self::default(), |sum, one| Self {
            due: sum.due + one.due,
            later: sum.later + one.later,
            running: sum.running + one.running,
            done: sum.done + one.done,
            failed: sum.failed + one.failed,
        })
    }
}

/// Where progress is shown.
pub(super) struct Screen {
    started: Instant,
    quiet: bool,
    to_stderr: bool,
    live: Option<Live>,
    /// What was told last, and when; only where nothing is redrawn.
    told: (Counts, Duration),
}

/// The lines that are redrawn.
struct Live {
    all: MultiProgress,
    bar: ProgressBar,
    counts: ProgressBar,
    hands: Vec<ProgressBar>,
}

impl Screen {
    /// Quiet: nothing at all. `to_stderr`: stdout is for a program.
    pub(super) fn new(quiet: bool, to_stderr: bool) -> Self {
        Self { started: Instant::now(), quiet, to_stderr, live: None, told: (Counts::default(), Duration::ZERO) }
    }

    /// Since when it is shown.
    pub(super) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// A line that stays, as it is.
    pub(super) fn say(&self, text: &str) {
        if self.quiet {
            return;
        }
        match &self.live {
            Some(live) => _ = live.all.println(text),
            // If nobody reads it any more, the end will say so.
            None if self.to_stderr => _ = writeln!(anstream::stderr().lock(), "{text}"),
            None => _ = writeln!(anstream::stdout().lock(), "{text}"),
        }
    }

    /// Something worth telling happened.
    pub(super) fn event(&self, text: &str) {
        self.say(&format!("{DIM}{:>6.1}s{DIM:#}  {text}", self.elapsed().as_secs_f64()));
    }

    /// Somebody else's words as part of an event: short where lines are redrawn, since the end tells them whole.
    pub(super) fn words(&self, text: &str) -> String {
        const CHARS: usize = 60;
        let text = clean(text);
        if self.live.is_none() || text.chars().count() <= CHARS {
            return text;
        }
        let cut: String = text.chars().take(CHARS).collect();
        format!("{}…", cut.rsplit_once(' ').map_or(cut.as_str(), |(head, _)| head))
    }

    /// Something usual happened: only told where nothing is redrawn.
    pub(super) fn detail(&self, text: &str) {
        if self.live.is_none() {
            self.event(text);
        }
    }

    /// Begins to redraw, where that is possible.
    pub(super) fn begin(&mut self, jobs: usize) {
        let terminal = if self.to_stderr { std::io::stderr().is_terminal() } else { std::io::stdout().is_terminal() };
        if self.quiet || !terminal || std::env::var_os("TERM").is_some_and(|term| term == "dumb") {
            return;
        }
        let target = if self.to_stderr {
            ProgressDrawTarget::stderr_with_hz(REDRAWS_PER_SECOND)
        } else {
            ProgressDrawTarget::stdout_with_hz(REDRAWS_PER_SECOND)
        };
        let all = MultiProgress::with_draw_target(target);
        let style = |template| ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let blank = all.add(ProgressBar::new(0).with_style(style(" ")));
        let bar = all.add(ProgressBar::new(jobs as u64));
        bar.set_style(style("  {bar:40.green/dim}  {pos} of {len} finished   {elapsed}").progress_chars("━━─"));
        let counts = all.add(ProgressBar::new(0).with_style(style("  {wide_msg}")));
        blank.tick();
        self.live = Some(Live { all, bar, counts, hands: Vec::new() });
    }

    /// Shows how it stands.
    pub(super) fn update(&mut self, counts: Counts, hands: &[Hand]) {
        let Some(live) = &mut self.live else {
            let now = self.elapsed();
            if counts != self.told.0 && now > self.told.1 + PLAIN_EVERY {
                self.told = (counts, now);
                let Counts { due, later, running, done, failed } = counts;
                self.event(&format!("due {due}, later {later}, running {running}, done {done}, failed {failed}"));
            }
            return;
        };
        live.bar.set_position(u64::try_from(counts.done + counts.failed).unwrap_or_default());
        live.counts.set_message(counts_line(counts));
        for (number, hand) in hands.iter().enumerate() {
            if live.hands.len() == number {
                let line = ProgressBar::new(0);
                let style = ProgressStyle::with_template("  {wide_msg}");
                line.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
                live.hands.push(live.all.add(line));
            }
            live.hands[number].set_message(hand_line(number, hand));
        }
        live.bar.tick();
    }

    /// Takes away what was redrawn.
    pub(super) fn end(&mut self) {
        if let Some(live) = self.live.take() {
            // A terminal that is gone needs no clearing.
            live.all.clear().ok();
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.end();
    }
}

fn counts_line(counts: Counts) -> String {
    let Counts { due, later, running, done, failed } = counts;
    let bad = if failed == 0 { DIM } else { BAD };
    format!(
        "due {BOLD}{due}{BOLD:#}   later {BOLD}{later}{BOLD:#}   running {HINT}{running}{HINT:#}   done {GOOD}{done}{GOOD:#}   \
         failed {bad}{failed}{bad:#}"
    )
}

fn hand_line(number: usize, hand: &Hand) -> String {
    let what = match hand.state {
        State::Starting => format!("{DIM}starting{DIM:#}"),
        State::Working => format!("{HINT}{:<6}{HINT:#} {} done", "●".repeat(hand.holds.len()), hand.done),
        State::Killed => format!("{BAD}killed{BAD:#} {DIM}{} done before{DIM:#}", hand.done),
        State::Gone => format!("{BAD}ended by itself{BAD:#}"),
    };
    format!("worker {} {DIM}pid {:<7}{DIM:#} {what}", number + 1, hand.pid)
}
