//! What a database or a role has set for every session of it, and what our calls need: READ COMMITTED, our search path, time.
//!
//! A database that was made read only is left so: that is how a standby, or a server whose disk is full, says that nothing may be written.
//!
//! Looked at once a connection. Where nothing is in the way, a call is a bare statement; else [`begin`] comes before it.

use std::time::Duration;

use tokio_postgres::{Client, Row};

use crate::error::{Error, Result};

/// By their full names, since the search path is one of them.
const LOOK: &str = "select pg_catalog.current_setting('default_transaction_isolation'), \
    pg_catalog.current_setting('row_security'), \
    (pg_catalog.current_schemas(true))[1]::text, pg_catalog.current_setting('statement_timeout'), \
    pg_catalog.current_setting('lock_timeout'), pg_catalog.current_setting('transaction_timeout', true)";

/// What Postgres answers where a setting was in the way that was not so when the connection was made: the isolation level, a
/// timeout of statements or locks.
const BLAMED: [&str; 3] = ["PH002", "57014", "55P03"];

/// Tries of what has to be done within a limit of somebody else: where that is a millisecond, a busy machine needs longer now and then,
/// several times in a row.
pub(super) const LIMITED_TRIES: u32 = 100;

/// Longer than the parts of a transaction that travels in one flight can be apart.
const IDLE_MS: u32 = 60_000;

/// Whether calls on a new connection must set what they need. `timeout` is how long a call may take: limits beyond it do no harm.
pub(super) async fn are_in_the_way(client: &Client, timeout: Duration) -> Result<bool> {
    match client.query_typed(LOOK, &[]).await.map_err(Error::from) {
        Ok(rows) => rows.first().map_or(Ok(true), |row| harm(row, timeout)),
        // Even this took longer than allowed.
        Err(error) if may_be_to_blame_for(&error) => Ok(true),
        Err(error) => Err(error),
    }
}

fn harm(row: &Row, timeout: Duration) -> Result<bool> {
    let is = |at: usize, wanted: &str| -> Result<bool> { Ok(row.try_get::<_, &str>(at)? == wanted) };
    let mut harm = !is(0, "read committed")? || !is(1, "on")?;
    harm |= row.try_get::<_, Option<&str>>(2)? != Some("pg_catalog");
    for limit in 3..=5 {
        let limit = row.try_get::<_, Option<&str>>(limit)?.unwrap_or("0");
        harm |= duration(limit).is_none_or(|limit| !limit.is_zero() && limit < timeout);
    }
    Ok(harm)
}

/// A duration as Postgres shows a setting: `0`, `100ms`, `5min`.
fn duration(text: &str) -> Option<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().ok()?;
    let unit_ms = match &text[digits..] {
        "" | "ms" => 1,
        "s" => 1_000,
        "min" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return None,
    };
    Some(Duration::from_millis(number.checked_mul(unit_ms)?))
}

/// What comes before a statement that is to have what it needs; a `commit` comes after it. The server gives up when we do.
pub(super) fn begin(timeout: Duration) -> String {
    let timeout_ms = timeout.as_millis().clamp(1, i32::MAX as u128);
    format!(
        "begin isolation level read committed; set local statement_timeout = {timeout_ms}; set local lock_timeout = 0; \
         set local search_path = pg_catalog, pg_temp; set local row_security = on; \
         set local idle_in_transaction_session_timeout = {IDLE_MS}; \
         select set_config(name, '0', true) from unnest(array['transaction_timeout']) name where current_setting(name, true) <> '0'"
    )
}

/// Whether a setting may be why that was not in the way before: then the same call, begun with what it needs, goes through.
pub(super) fn may_be_to_blame_for(error: &Error) -> bool {
    error.sqlstate().is_some_and(|code| BLAMED.contains(&code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_postgres_shows_them() {
        for (text, ms) in
            [("0", 0), ("100ms", 100), ("1s", 1_000), ("90s", 90_000), ("2min", 120_000), ("1h", 3_600_000)]
        {
            assert_eq!(duration(text), Some(Duration::from_millis(ms)), "{text}");
        }
        assert_eq!(duration("2d"), Some(Duration::from_secs(172_800)));
        for text in ["", "s", "1y", "99999999999999999999s", "-1"] {
            assert_eq!(duration(text), None, "{text}");
        }
    }
}
