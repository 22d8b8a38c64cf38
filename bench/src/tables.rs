//! What the queue's tables hold beside jobs: dead rows, and room on the disk.

use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::error::Result;

/// Sessions tell the statistics at least this often.
const TOLD: Duration = Duration::from_millis(1_200);

/// Rows that nobody needs any more but are still there.
pub(crate) async fn dead_rows(client: &Client) -> Result<f64> {
    let count = "select coalesce(sum(n_dead_tup), 0)::float8 from pg_stat_user_tables where schemaname = 'posthouse'";
    let mut dead: f64 = client.query_one(count, &[]).await?.get(0);
    loop {
        tokio::time::sleep(TOLD).await;
        let now = client.query_one(count, &[]).await?.get(0);
        if now == dead {
            return Ok(dead);
        }
        dead = now;
    }
}

/// The size of the whole database.
pub(crate) async fn size_mib(client: &Client) -> Result<f64> {
    let size = "select pg_database_size(current_database()) / 1048576.0::float8";
    Ok(client.query_one(size, &[]).await?.get(0))
}

/// Vacuums each table. Answers with the seconds.
pub(crate) async fn vacuum(client: &Client) -> Result<f64> {
    let tables = "select format('vacuum (analyze) %I.%I', n.nspname, c.relname) from pg_class c \
                  join pg_namespace n on n.oid = c.relnamespace where n.nspname = 'posthouse' and c.relkind = 'r'";
    let tables = client.query(tables, &[]).await?;
    let start = Instant::now();
    for table in &tables {
        client.batch_execute(table.get(0)).await?;
    }
    Ok(start.elapsed().as_secs_f64())
}
