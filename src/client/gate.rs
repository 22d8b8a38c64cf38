//! Gates and tenants: what is set for them, who closes and opens them, and what endpoints answered.

use std::time::Duration;

use super::Posthouse;
use crate::error::Result;
use crate::store::{Closure, EndpointVerdict, GateLimits, GateRecord, TenantRecord};

impl Posthouse {
    /// Set all limits of a gate: `queue:Q`, `tenant:T`, `model:M`, `endpoint:PROVIDER/MODEL`, with `*` for each that has no limits
    /// of its own (`tenant:*`), or a name without a colon that jobs ask for ([`gate`](crate::client::Enqueue::gate)). Claims
    /// go by them as soon as this returns. An error names the limit that cannot be.
    ///
    /// ```no_run
    /// # async fn f(queue: posthouse::Posthouse) -> posthouse::Result<()> {
    /// use posthouse::store::GateLimits;
    /// queue.set_gate("model:gpt-4o", &GateLimits { max_running: Some(40), tokens_per_minute: Some(90_000), ..Default::default() }).await?;
    /// queue.set_gate("tenant:*", &GateLimits { max_running: Some(5), ..Default::default() }).await?;
    /// # Ok(()) }
    /// ```
    pub async fn set_gate(&self, name: &str, limits: &GateLimits) -> Result<()> {
        self.store.set_gate(name, limits).await
    }

    /// Remove a gate and what it has counted. False: there was none.
    pub async fn remove_gate(&self, name: &str) -> Result<bool> {
        self.store.remove_gate(name).await
    }

    /// Close a gate until a time in any form that Postgres reads, or `infinity`, until somebody opens it: jobs that would pass it
    /// wait and keep their place. It is made if there is none. Closing `tenant:T` or `queue:Q` pauses that tenant or queue.
    pub async fn close_gate(&self, name: &str, until: &str, reason: Option<&str>) -> Result<()> {
        self.store.close_gate(name, until, reason).await
    }

    /// Open a gate, whoever closed it. False: it was open, or there is none.
    pub async fn open_gate(&self, name: &str) -> Result<bool> {
        self.store.open_gate(name).await
    }

    /// Every gate: what is set, whether it is closed, and what has passed.
    pub async fn gates(&self) -> Result<Vec<GateRecord>> {
        self.store.gates().await
    }

    /// Say which gates the jobs of a kind pass besides those of queue, tenant and their own, normally `model:M`, and how long
    /// its answers can be, in tokens. Workers with a configuration say it when they start.
    pub async fn set_kind(&self, kind: &str, gates: &[String], max_output_tokens: Option<u32>) -> Result<()> {
        self.store.set_kind(kind, gates, max_output_tokens).await
    }

    /// Say where a model is asked, in order of preference, as PROVIDER/MODEL: while all of them are closed, no job of the model is
    /// claimed.
    pub async fn set_route(&self, model: &str, endpoints: &[String]) -> Result<()> {
        self.store.set_route(model, endpoints).await
    }

    /// Tell every worker what an endpoint answered to a request that was sent `age` ago. Answers for how long it is closed now;
    /// `None`: it is open.
    pub async fn report_endpoint(
        &self,
        endpoint: &str,
        verdict: EndpointVerdict,
        wait: Option<Duration>,
        reason: Option<&str>,
        age: Duration,
    ) -> Result<Option<Duration>> {
        self.store.report_endpoint(endpoint, verdict, wait, reason, age).await
    }

    /// The endpoints that are closed for everybody, or whose time is over and that nobody has tried since.
    pub async fn closures(&self) -> Result<Vec<Closure>> {
        self.store.closures().await
    }

    /// Ask to be the one that tries an endpoint whose time is over. True: go on.
    pub async fn begin_probe(&self, endpoint: &str, job_id: i64) -> Result<bool> {
        self.store.begin_probe(endpoint, job_id).await
    }

    /// Set the weight of a tenant, 0.01 to 100: with 2 it gets twice the share of claims of one with 1, which is what tenants have
    /// that are not set.
    pub async fn set_tenant(&self, tenant: &str, weight: f32) -> Result<()> {
        self.store.set_tenant(tenant, weight).await
    }

    /// The tenants whose weight was set.
    pub async fn tenants(&self) -> Result<Vec<TenantRecord>> {
        self.store.tenants().await
    }
}
