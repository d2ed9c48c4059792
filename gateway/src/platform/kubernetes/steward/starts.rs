//! How lives begin.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::AtomicBool},
};

use rouse::{fault::Cause, fleet::event::Event, model::EngineId, units::Generation};
use tokio::sync::{mpsc, watch};

use super::{Leaving, Life, Steward};
use crate::{
    controllers::{crd::ledger::ObjectName, pods::Seen},
    platform::kubernetes::{
        Place,
        external::{External, Visit},
        life::{self, Berth, Order, Start},
    },
};

impl Steward {
    pub(super) async fn launch(&mut self, engine: EngineId, generation: Generation) {
        if let Some(external) =
            self.shared.external(&engine.model).filter(|_| !self.lives.contains_key(&engine))
        {
            return self.visit(engine, generation, external, None);
        }
        // What was booked is what it runs by, also where the objects say something else by now.
        let place = self.booked.remove(&engine).or_else(|| self.shared.place(&engine.model));
        let runs = self.lives.contains_key(&engine);
        let Some(place) = place.filter(|_| !runs) else {
            tracing::error!(%engine, %generation, runs, "cannot be launched");
            let cause = Cause::Refused;
            return self.shared.common.tell(Event::Gone { engine, generation, cause }).await;
        };
        self.enlist(engine, generation, place, None, Start::Launch);
    }

    /// Begins a life.
    pub(in crate::platform::kubernetes) fn enlist(
        &mut self,
        id: EngineId,
        generation: Generation,
        place: Arc<Place>,
        pod: Option<Arc<Seen>>,
        start: Start,
    ) {
        self.begin(id, generation, place, pod, start, None);
    }

    /// `leaving`: no Pod is to be kept for it from the start.
    pub(super) fn begin(
        &mut self,
        id: EngineId,
        generation: Generation,
        place: Arc<Place>,
        pod: Option<Arc<Seen>>,
        start: Start,
        leaving: Leaving,
    ) {
        let deployment = match &pod {
            Some(pod) => place.deployment_of(&pod.template),
            None => place.deployment(),
        };
        let (orders, received) = mpsc::unbounded_channel();
        let (shown, seen) = watch::channel(pod.clone());
        let berth = Berth {
            shared: Arc::clone(&self.shared),
            id: id.clone(),
            generation,
            place: Arc::clone(&place),
            requests: self.requests.clone(),
            located: AtomicBool::new(false),
        };
        self.tasks.spawn(life::live(Arc::new(berth), received, seen, start));
        let life = Life {
            generation,
            place: Some(Arc::clone(&place)),
            deployment: deployment.clone(),
            orders,
            bound: pod.is_some(),
            pod: pod.map(|pod| pod.name.clone()),
            shown,
            leaving,
        };
        self.lives.insert(id, life);
        self.recount(&deployment, Some(place));
        self.assign(&deployment);
    }

    /// Begins dealings with a backend; `known`: where it is, when it serves already.
    pub(in crate::platform::kubernetes) fn visit(
        &mut self,
        id: EngineId,
        generation: Generation,
        external: Arc<External>,
        known: Option<SocketAddr>,
    ) {
        let (orders, received) = mpsc::unbounded_channel();
        let common = Arc::clone(&self.shared.common);
        let requests = self.requests.clone();
        let told = Arc::clone(&self.shared.told);
        let visit = Visit { common, told, id: id.clone(), generation, external, requests };
        self.tasks.spawn(visit.live(received, known));
        let (shown, _) = watch::channel(None);
        let deployment = ObjectName::new("", "");
        let (place, pod, leaving) = (None, None, None);
        let life = Life { generation, place, deployment, orders, pod, shown, bound: true, leaving };
        self.lives.insert(id, life);
    }

    /// Ends an engine that nobody took over: what it has is seen to its end, and given back.
    pub(in crate::platform::kubernetes) async fn dismiss(
        &mut self,
        place: &Arc<Place>,
        replica: u32,
        generation: Generation,
        pod: Option<Arc<Seen>>,
    ) {
        let engine = EngineId::new(place.engine.name.clone(), replica);
        if self.lives.contains_key(&engine) {
            return;
        }
        let start = if pod.is_some() { Start::Starting } else { Start::Launch };
        let leaving = Some((u64::MAX, None));
        self.begin(engine.clone(), generation, Arc::clone(place), pod, start, leaving);
        self.order(engine, generation, Order::Stop).await;
    }
}
