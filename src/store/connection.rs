//! One connection to Postgres that is made when needed and calls functions in one flight each.
//!
//! Each call is a statement of its own, unless the settings that the database or the role has for everybody would change what it
//! does (see [`super::surroundings`]): then it travels with a `begin` that sets what it needs and a `commit`, still in one flight.
//! Nothing is set for a session, since behind a transaction-mode pooler that is somebody else's the next moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::{join, join3};
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};

use super::database::{Database, Target};
use super::surroundings;
use crate::error::{Error, Result};
use crate::pause::jitter;

/// How long a call may take before the connection is given up: a lost packet must not hold a worker for ever.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Tries of a call that Postgres has rolled back because of others: each was undone whole, so that it can be made again.
const TRIES: u32 = 8;

/// Postgres had ended the session, since nothing came for `idle_session_timeout`, before it read the call: nothing was done. Said in
/// answer to the call or, if it came before that was sent, to nobody: see [`drive`].
const ENDED_WHILE_IDLE: &str = "57P05";

/// As much as an interval of Postgres holds without doubt: what is longer is refused by the function that gets it, by its name.
pub(super) const LONGEST_MS: f64 = 1e14;

/// A parameter and its type: naming the type saves the driver a round trip.
pub(super) type Parameter = (Box<dyn ToSql + Sync + Send>, Type);

/// One connection. Clones share it.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    database: Database,
    name: String,
    timeout: Duration,
    link: Mutex<Option<Link>>,
    /// Keeps calls with a transaction of their own apart on the pipelined connection.
    turn: Arc<Mutex<()>>,
}

struct Link {
    session: Arc<Session>,
    _task: AbortOnDrop,
}

/// What becomes of what a statement did.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Kept,
    Undone,
}

/// Nothing was done: the transaction could not be begun, as within a limit that the `begin` was about to lift.
struct NotBegun(Error);

/// Ends the connection, also one whose maker gave up before it was of use.
struct AbortOnDrop(JoinHandle<()>);

/// A connection, and whether calls on it open a transaction of their own.
struct Session {
    client: Client,
    ended_while_idle: Arc<AtomicBool>,
    explicit: AtomicBool,
    /// What such a transaction begins with.
    begin: String,
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Database {
    /// A connection of its own, made at its first call, that `pg_stat_activity` shows as `posthouse/name`.
    pub fn store(&self, name: &str) -> Store {
        Store::new(self.clone(), name, CALL_TIMEOUT)
    }
}

impl Store {
    fn new(database: Database, name: &str, timeout: Duration) -> Self {
        Self {
            inner: Arc::new(Inner {
                database,
                name: name.to_owned(),
                timeout,
                link: Mutex::new(None),
                turn: Arc::new(Mutex::new(())),
            }),
        }
    }

    /// A connection of its own to the same database whose calls are given up after `timeout`. Default: 30 seconds.
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self::new(self.inner.database.clone(), &self.inner.name, timeout)
    }

    /// The database it connects to.
    pub fn database(&self) -> &Database {
        &self.inner.database
    }

    /// Make the connection, if it is not there.
    pub(crate) async fn connect(&self) -> Result<()> {
        self.session().await.map(|_| ())
    }

    /// Whether the connection is there. False also while somebody is just making it or looking.
    pub(crate) fn is_connected(&self) -> bool {
        self.inner.link.try_lock().is_ok_and(|link| link.as_ref().is_some_and(|link| !link.session.client.is_closed()))
    }

    /// Ask Postgres for a sign of life.
    pub async fn ping(&self) -> Result<()> {
        self.call("select 1", Vec::new()).await.map(|_| ())
    }

    /// Run one statement. It takes effect whole or not at all, also if this future is dropped.
    pub(super) async fn call(&self, sql: &'static str, parameters: Vec<Parameter>) -> Result<Vec<Row>> {
        self.call_until(sql, parameters, End::Kept).await
    }

    async fn call_until(&self, sql: &'static str, parameters: Vec<Parameter>, end: End) -> Result<Vec<Row>> {
        let inner = &self.inner;
        let parameters = Arc::new(parameters);
        let work = async {
            let mut tries = 1;
            loop {
                let session = self.session().await?;
                let explicit = end == End::Undone || session.explicit.load(Ordering::Relaxed);
                let answer = match explicit {
                    false => query(&session.client, sql, &parameters).await,
                    true => self.call_apart(session.clone(), sql, parameters.clone(), end).await,
                };
                let Err(error) = answer else { return answer };
                if !explicit
                    && surroundings::may_be_to_blame_for(&error)
                    && surroundings::are_in_the_way(&session.client, inner.timeout).await.unwrap_or(false)
                {
                    session.explicit.store(true, Ordering::Relaxed);
                } else if tries < TRIES && session.has_ended_while_idle(&error) {
                    self.disconnect().await;
                } else if tries < TRIES && error.is_rolled_back() {
                    tokio::time::sleep(jitter(Duration::from_millis(5) * tries)).await;
                } else {
                    return Err(error);
                }
                tries += 1;
            }
        };
        let result = match tokio::time::timeout(inner.timeout, work).await {
            Ok(result) => result,
            Err(_) => Err(Error::disconnected(format!("no answer from Postgres within {:?}", inner.timeout), false)),
        };
        match &result {
            Ok(_) => inner.database.note_answer(),
            Err(error) if error.is_disconnected() => self.disconnect().await,
            Err(_) => {}
        }
        result
    }

    /// Run one statement in a transaction that sets what it needs, in one flight.
    async fn call_apart(
        &self,
        session: Arc<Session>,
        sql: &'static str,
        parameters: Arc<Vec<Parameter>>,
        end: End,
    ) -> Result<Vec<Row>> {
        let turn = self.inner.turn.clone().lock_owned().await;
        // A task of its own, so that dropping the caller's future leaves no transaction open.
        let task = tokio::spawn(async move {
            let _turn = turn;
            let mut tries = 1;
            loop {
                match in_transaction(&session, sql, &parameters, end).await {
                    Err(NotBegun(error))
                        if tries < surroundings::LIMITED_TRIES && surroundings::may_be_to_blame_for(&error) =>
                    {
                        tries += 1
                    }
                    Err(NotBegun(error)) => return Err(error),
                    Ok(answer) => return answer,
                }
            }
        });
        task.await.map_err(|_| Error::disconnected("the connection's task ended", false))?
    }

    /// Run one statement that answers with exactly one row.
    pub(super) async fn call_one(&self, sql: &'static str, parameters: Vec<Parameter>) -> Result<Row> {
        let rows = self.call(sql, parameters).await?;
        rows.into_iter().next().ok_or_else(|| Error::schema("a function of the schema answered nothing"))
    }

    /// The same, with nothing of what it does left. On a connection for this alone: what others call on a shared one meanwhile would be undone with it.
    pub(super) async fn call_one_undone(&self, sql: &'static str, parameters: Vec<Parameter>) -> Result<Row> {
        let alone = self.with_timeout(self.inner.timeout);
        let rows = alone.call_until(sql, parameters, End::Undone).await?;
        rows.into_iter().next().ok_or_else(|| Error::schema("a function of the schema answered nothing"))
    }

    /// Close the connection; the next call makes a new one.
    pub async fn disconnect(&self) {
        self.inner.link.lock().await.take();
    }

    async fn session(&self) -> Result<Arc<Session>> {
        let mut link = self.inner.link.lock().await;
        if let Some(link) = link.as_ref().filter(|l| !l.session.client.is_closed()) {
            return Ok(link.session.clone());
        }
        *link = None;
        let Connected { client, task, ended_while_idle } = connect(&self.inner.database.main, &self.inner.name).await?;
        let (link_task, begin) = (AbortOnDrop(task), surroundings::begin(self.inner.timeout));
        let explicit = AtomicBool::new(surroundings::are_in_the_way(&client, self.inner.timeout).await?);
        let session = Arc::new(Session { client, ended_while_idle, explicit, begin });
        *link = Some(Link { session: session.clone(), _task: link_task });
        Ok(session)
    }
}

impl Session {
    /// An error that says so, or one of a connection that had ended so: it never reads what is sent after that.
    fn has_ended_while_idle(&self, error: &Error) -> bool {
        error.sqlstate() == Some(ENDED_WHILE_IDLE)
            || (error.is_disconnected() && self.ended_while_idle.load(Ordering::Acquire))
    }
}

/// One try of a statement between `begin` and its end.
async fn in_transaction(
    session: &Session,
    sql: &str,
    parameters: &[Parameter],
    end: End,
) -> std::result::Result<Result<Vec<Row>>, NotBegun> {
    let begin = session.client.batch_execute(&session.begin);
    let statement = query(&session.client, sql, parameters);
    let not_begun = |error: tokio_postgres::Error| NotBegun(error.into());
    match end {
        End::Kept => {
            // What came after a `begin` that was refused as a whole ran by itself and stays: then its answer is the answer.
            match join3(begin, statement, session.client.batch_execute("commit")).await {
                (Err(error), Err(_), _) => Err(not_begun(error)),
                (Ok(()), Ok(_), Err(error)) => Ok(Err(error.into())),
                (_, answer, _) => Ok(answer),
            }
        }
        End::Undone => {
            // Nothing may stay, so that it waits until there is a transaction.
            if let Err(error) = begin.await {
                let _ = session.client.batch_execute("rollback").await;
                return Err(not_begun(error));
            }
            let (answer, undone) = join(statement, session.client.batch_execute("rollback")).await;
            Ok(answer.and_then(|rows| undone.map(|()| rows).map_err(Into::into)))
        }
    }
}

async fn query(client: &Client, sql: &str, parameters: &[Parameter]) -> Result<Vec<Row>> {
    let typed: Vec<(&(dyn ToSql + Sync), Type)> =
        parameters.iter().map(|(p, t)| (p.as_ref() as &(dyn ToSql + Sync), t.clone())).collect();
    Ok(client.query_typed(sql, &typed).await?)
}

/// A connection, and what drives it.
pub(super) struct Connected {
    pub(super) client: Client,
    pub(super) task: JoinHandle<()>,
    ended_while_idle: Arc<AtomicBool>,
}

/// Connect, and drive the connection in a task.
pub(super) async fn connect(target: &Target, name: &str) -> Result<Connected> {
    let mut config = target.config.clone();
    config.application_name(format!("posthouse/{name}"));
    let say_where = |error: tokio_postgres::Error| {
        let error = Error::from(error);
        match error.to_string().strip_prefix("no connection to Postgres: ") {
            Some(why) => {
                let why = why.strip_prefix("error connecting to server: ").unwrap_or(why).to_owned();
                error.saying(format!("no connection to Postgres at {}: {why}", target.place()))
            }
            None => error,
        }
    };
    #[cfg(feature = "tls")]
    let (client, connection) = config.connect(super::tls::connector(target)?).await.map_err(say_where)?;
    #[cfg(not(feature = "tls"))]
    let (client, connection) = config.connect(tokio_postgres::NoTls).await.map_err(say_where)?;
    let ended_while_idle = Arc::new(AtomicBool::new(false));
    let task = tokio::spawn(drive(connection, ended_while_idle.clone()));
    Ok(Connected { client, task, ended_while_idle })
}

/// Drive a connection to its end.
async fn drive<C>(mut connection: C, ended_while_idle: Arc<AtomicBool>)
where
    C: Future<Output = std::result::Result<(), tokio_postgres::Error>> + Unpin,
{
    let result = (&mut connection).await;
    if result.is_err_and(|error| error.code().is_some_and(|code| code.code() == ENDED_WHILE_IDLE)) {
        ended_while_idle.store(true, Ordering::Release);
    }
    // Those who wait for answers hear of the end only now that it is noted.
    drop(connection);
}

/// Shorthand for a parameter.
pub(super) fn p(value: impl ToSql + Sync + Send + 'static, kind: Type) -> Parameter {
    (Box::new(value), kind)
}
