//! The end of the demo: what came out, what went wrong and how it was healed, and whether all is as it should be.

use posthouse::store::JobRecord;
use posthouse_llm::sim::expected_answer;
use serde_json::{Value, json};

use super::healing::{self, Healing};
use super::played::{Played, named};
use super::trouble::SHOW_MIN;
use crate::failure::Result;
use crate::output::{Grid, cell, count, json as print_json, line, state};
use crate::style::{BAD, BOLD, DIM, GOOD, clean};

/// One thing that must hold.
struct Check {
    holds: bool,
    text: String,
}

impl Played {
    fn checks(&self) -> Vec<Check> {
        let check = |holds, text: String| Check { holds, text };
        let total = self.texts.len();
        let finals = self.jobs().filter(|(job, _)| job.is_final()).count();
        let mut checks = vec![check(
            finals == total && self.duplicates() == 0,
            format!("{finals} of {total} jobs have exactly one final record; duplicates: {}", self.duplicates()),
        )];
        let (failed, expected) = (self.in_state("failed"), self.expected_failures());
        checks.push(match expected.as_slice() {
            [] => check(failed.is_empty(), format!("no job failed: {} failed", failed.len())),
            [one] => check(
                failed == expected,
                format!("exactly one job failed for good, as scripted: {}", jobs(&failed, *one)),
            ),
            _ => check(failed == expected, format!("as scripted, {} jobs failed for good", failed.len())),
        });
        if self.stats.is_some() {
            let done = self.in_state("done").len();
            let right =
                self.jobs().filter(|(job, text)| answer(job).is_some_and(|a| a == expected_answer(text))).count();
            checks.push(check(right == done, format!("{right} of {done} answers belong to their text, by checksum")));
        }
        if let Some(killed) = &self.killed {
            let healed = killed.jobs.iter().all(|id| self.jobs().any(|(job, _)| job.id == *id && job.is_final()));
            let text = format!("the killed worker held {}, and others finished what it held", named(&killed.jobs));
            checks.push(check(healed && !killed.jobs.is_empty(), text));
        } else if self.stats.is_some() && total >= SHOW_MIN {
            checks.push(check(false, "a worker was to be killed while it held jobs, and none was".to_owned()));
        }
        checks
    }

    /// What could not be checked, and why.
    fn unchecked(&self) -> Vec<&'static str> {
        let mut why = Vec::new();
        if self.stats.is_none() {
            why.push("whether an answer belongs to its text, only the simulated provider can tell: not checked");
        }
        if self.killed.is_none() {
            why.push("no worker was killed: everything was done before one could be caught with a job in its hands");
        }
        why
    }

    /// Tells people. True if all is as it should be.
    pub(super) fn tell(&self) -> Result<bool> {
        line("")?;
        self.table()?;
        let healings = healing::all(self);
        if !healings.is_empty() {
            line(format!("\n{BOLD}What went wrong, and how it was healed{BOLD:#}\n"))?;
            for Healing { what, trouble, cure } in &healings {
                line(format!("  {BOLD}{what:<14}{BOLD:#} {}", hanging(trouble, 17)))?;
                line(format!("  {:<14} {GOOD}→{GOOD:#} {}", "", hanging(cure, 19)))?;
            }
        }
        line(format!("\n{BOLD}Is all as it should be?{BOLD:#}\n"))?;
        let checks = self.checks();
        for Check { holds, text } in &checks {
            line(if *holds { format!("  {GOOD}✓{GOOD:#} {text}") } else { format!("  {BAD}✗ {text}{BAD:#}") })?;
        }
        for text in self.unchecked() {
            line(format!("  {DIM}· {text}{DIM:#}"))?;
        }
        let all_hold = checks.iter().all(|check| check.holds);
        self.tell_sum(all_hold)?;
        Ok(all_hold)
    }

    fn tell_sum(&self, all_hold: bool) -> Result<()> {
        let (done, failed) = (self.in_state("done").len(), self.in_state("failed").len());
        let asked = self.stats.as_ref().map(|stats| format!(" and {}", plural(stats.requests, "request")));
        let (asked, seconds) = (asked.unwrap_or_default(), self.elapsed.as_secs_f64());
        let (style, verdict) = if all_hold { (GOOD, "Yes.") } else { (BAD, "No.") };
        let jobs = plural(self.texts.len() as u64, "job");
        line(format!("\n{style}{verdict}{style:#} {jobs}{asked} in {seconds:.1} s: {done} done, {failed} failed."))?;
        line(format!(
            "{DIM}Nothing of it is left on this machine. `posthouse dev` is the same, staying up and empty.{DIM:#}"
        ))?;
        Ok(())
    }

    fn table(&self) -> Result<()> {
        let mut grid = Grid::new(&["job", "state", "tries", "text", "answer"]).right(&[0, 2]);
        for (job, text) in self.jobs() {
            let said = answer(job).or_else(|| job.error.clone()).unwrap_or_default();
            let tries = count(i64::from(job.attempt));
            grid.row(vec![cell(job.id.to_string()), state(&job.state), tries, cell(beginning(text)), cell(said)]);
        }
        grid.print()
    }

    /// Tells a program. True if all is as it should be.
    pub(super) fn tell_json(&self) -> Result<bool> {
        let checks = self.checks();
        let all_hold = checks.iter().all(|check| check.holds);
        let answers: Vec<Value> = self
            .jobs()
            .map(|(job, text)| {
                json!({
                    "id": job.id, "input": text, "answer": answer(job), "attempts": job.attempt, "state": job.state,
                    "error": job.error,
                })
            })
            .collect();
        let told = json!({
            "ok": all_hold,
            "jobs": self.texts.len(),
            "done": self.in_state("done").len(),
            "failed": self.in_state("failed").len(),
            "duplicates": self.duplicates(),
            "seconds": (self.elapsed.as_secs_f64() * 1_000.0).round() / 1_000.0,
            "requests": self.stats.as_ref().map(|stats| stats.requests),
            "killed": self.killed.as_ref().map(|k| json!({ "worker": k.worker, "pid": k.pid, "jobs": k.jobs })),
            "trouble": healing::all(self).iter().map(Healing::to_json).collect::<Vec<_>>(),
            "checks": checks.iter().map(|c| json!({ "holds": c.holds, "check": c.text })).collect::<Vec<_>>(),
            "unchecked": self.unchecked(),
            "answers": answers,
        });
        print_json(&told)?;
        Ok(all_hold)
    }
}

/// The text of a job's answer.
fn answer(job: &JobRecord) -> Option<String> {
    let result: Value = serde_json::from_str(job.result.as_ref()?.get()).ok()?;
    result["text"].as_str().map(str::to_owned)
}

fn jobs(failed: &[i64], expected: i64) -> String {
    if failed == [expected] {
        format!("job {expected}")
    } else {
        format!("{} instead of job {expected}", named(failed))
    }
}

/// A text that is broken where the terminal ends, its further lines indented. Elsewhere it is one line.
fn hanging(text: &str, indent: usize) -> String {
    let text = clean(text);
    let width = comfy_table::Table::new().width().map_or(usize::MAX, usize::from);
    let mut broken = String::with_capacity(text.len());
    let mut column = indent;
    for (i, word) in text.split(' ').enumerate() {
        let length = word.chars().count();
        if i > 0 && column + 1 + length > width {
            broken.push('\n');
            broken.extend(std::iter::repeat_n(' ', indent));
            column = indent;
        } else if i > 0 {
            broken.push(' ');
            column += 1;
        }
        broken.push_str(word);
        column += length;
    }
    broken
}

fn plural(number: u64, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// The first words of a text.
fn beginning(text: &str) -> String {
    const CHARS: usize = 30;
    let one_line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if one_line.chars().count() <= CHARS {
        return one_line;
    }
    let cut: String = one_line.chars().take(CHARS).collect();
    format!("{}…", cut.rsplit_once(' ').map_or(cut.as_str(), |(head, _)| head))
}
