//! What the commands about schedules say in common.

use std::time::SystemTime;

use posthouse::store::ScheduleChange;

use crate::failure::Failure;

pub(super) fn no_schedule(name: &str) -> Failure {
    Failure::new(format!("schedule {name}: there is no such schedule"))
        .hint("`posthouse schedule list` shows those that there are")
}

pub(super) fn rfc3339(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}

pub(super) fn word(change: ScheduleChange) -> &'static str {
    match change {
        ScheduleChange::New => "new",
        ScheduleChange::Changed => "changed",
        ScheduleChange::Same => "as it was",
    }
}
