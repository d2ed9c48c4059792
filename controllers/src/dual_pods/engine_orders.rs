//! The leader's orders about engines in mode dualPods, and the reports on them.
//!
//! In a pool of slots the fleet decides when an engine sleeps and wakes, and the pairing controller executes that. Its
//! thread is another than the engines', so the newest order for each requester waits here until it is taken, and each
//! report until the next one. All are of one term: the engine manager clears them, once no task can order anything.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rouse::pairing::{
    EngineReport,
    event::WantedState,
    ids::{NodeName, RequesterId},
};
use tokio::sync::{Notify, watch};

/// What a requester's engine is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EngineOrder {
    pub(crate) node: NodeName,
    pub(crate) requester: RequesterId,
    /// `None`: the engine is not wanted awake any more, because its requester is about to go.
    pub(crate) wanted: Option<WantedState>,
}

/// Orders for requesters, and reports about them.
#[derive(Clone, Debug, Default)]
pub(crate) struct EngineOrders(Arc<OrderMailbox>);

/// The reader of the orders.
#[derive(Debug)]
pub(crate) struct EngineOrderReceiver(Arc<OrderMailbox>);

#[derive(Debug, Default)]
struct OrderMailbox {
    content: Mutex<OrdersOfTerm>,
    ordered: Notify,
}

/// Everything of one term.
#[derive(Debug, Default)]
struct OrdersOfTerm {
    /// The newest order for each requester.
    wanted: BTreeMap<NodeName, BTreeMap<RequesterId, WantedState>>,
    /// Requesters whose newest order was not taken yet.
    unread: BTreeSet<(NodeName, RequesterId)>,
    reports: BTreeMap<RequesterId, watch::Sender<Option<EngineReport>>>,
}

impl EngineOrders {
    #[must_use]
    pub(crate) fn new() -> (Self, EngineOrderReceiver) {
        let orders = Self::default();
        let receiver = EngineOrderReceiver(Arc::clone(&orders.0));
        (orders, receiver)
    }

    /// Gives an order, in place of an earlier one for this requester. Never waits.
    pub(crate) fn order(&self, order: EngineOrder) {
        let EngineOrder { node, requester, wanted } = order;
        let mut content = self.0.lock();
        content.unread.insert((node.clone(), requester.clone()));
        match wanted {
            Some(wanted) => {
                content.wanted.entry(node).or_default().insert(requester, wanted);
            }
            None => content.withdraw(&node, &requester),
        }
        drop(content);
        self.0.ordered.notify_one();
    }

    /// Returns the reports about this requester's engine; `None` before the first one.
    ///
    /// The sender is dropped once the requester is gone.
    pub(crate) fn reports(&self, requester: &RequesterId) -> watch::Receiver<Option<EngineReport>> {
        let mut content = self.0.lock();
        content.reports.entry(requester.clone()).or_insert_with(|| watch::Sender::new(None)).subscribe()
    }

    /// Publishes what became of the orders for this node's requesters. Of one without an order, nothing is published.
    pub(crate) fn publish(&self, node: &NodeName, report: impl Fn(&RequesterId) -> Option<EngineReport>) {
        let mut content = self.0.lock();
        let OrdersOfTerm { wanted, reports, .. } = &mut *content;
        for requester in wanted.get(node).into_iter().flat_map(BTreeMap::keys) {
            let report = report(requester);
            let reports = reports.entry(requester.clone()).or_insert_with(|| watch::Sender::new(None));
            reports.send_if_modified(|last| std::mem::replace(last, report) != report);
        }
    }

    /// Returns what the newest order for this requester says.
    #[must_use]
    pub(crate) fn wanted(&self, node: &NodeName, requester: &RequesterId) -> Option<WantedState> {
        self.0.lock().wanted.get(node)?.get(requester).copied()
    }

    /// Returns all orders that stand, for a reader that has forgotten them.
    #[must_use]
    pub(crate) fn all(&self) -> Vec<EngineOrder> {
        let content = self.0.lock();
        let all = content.wanted.iter().flat_map(|(node, wanted)| wanted.iter().map(move |one| (node, one)));
        let order = |(node, (requester, wanted)): (&NodeName, (&RequesterId, &WantedState))| EngineOrder {
            node: node.clone(),
            requester: requester.clone(),
            wanted: Some(*wanted),
        };
        all.map(order).collect()
    }

    /// Forgets a requester that is gone, or whose engine's task has ended.
    pub(crate) fn forget(&self, node: &NodeName, requester: &RequesterId) {
        let mut content = self.0.lock();
        content.reports.remove(requester);
        content.unread.remove(&(node.clone(), requester.clone()));
        content.withdraw(node, requester);
    }

    /// Forgets everything: the term has ended.
    pub(crate) fn clear(&self) {
        *self.0.lock() = OrdersOfTerm::default();
    }
}

impl EngineOrderReceiver {
    /// Takes an order that was not taken yet; waits for one. A call that is dropped takes nothing.
    pub(crate) async fn recv(&mut self) -> EngineOrder {
        loop {
            if let Some(order) = self.try_recv() {
                return order;
            }
            self.0.ordered.notified().await;
        }
    }

    fn try_recv(&self) -> Option<EngineOrder> {
        let mut content = self.0.lock();
        let (node, requester) = content.unread.pop_first()?;
        let wanted = content.wanted.get(&node).and_then(|of_node| of_node.get(&requester)).copied();
        Some(EngineOrder { node, requester, wanted })
    }
}

impl OrdersOfTerm {
    /// Removes the order for this requester, so that no later reader gets it.
    fn withdraw(&mut self, node: &NodeName, requester: &RequesterId) {
        if let Some(wanted) = self.wanted.get_mut(node) {
            wanted.remove(requester);
            if wanted.is_empty() {
                self.wanted.remove(node);
            }
        }
    }
}

impl OrderMailbox {
    fn lock(&self) -> MutexGuard<'_, OrdersOfTerm> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use rouse::model::SleepLevel;

    use super::*;

    const ASLEEP: WantedState = WantedState::Asleep { level: SleepLevel::One };

    fn order(requester: &str, wanted: WantedState) -> EngineOrder {
        EngineOrder { node: "n".into(), requester: requester.into(), wanted: Some(wanted) }
    }

    fn withdrawal(requester: &str) -> EngineOrder {
        EngineOrder { node: "n".into(), requester: requester.into(), wanted: None }
    }

    #[tokio::test]
    async fn the_newest_order_for_each_requester_is_taken_once() {
        let (orders, mut taken) = EngineOrders::new();
        orders.order(order("a", WantedState::Awake));
        orders.order(order("b", WantedState::Awake));
        orders.order(order("a", ASLEEP));
        assert_eq!(
            [taken.recv().await, taken.recv().await],
            [order("a", ASLEEP), order("b", WantedState::Awake)]
        );
        assert!(taken.recv().now_or_never().is_none());
        assert_eq!(orders.wanted(&"n".into(), &"a".into()), Some(ASLEEP));
        assert_eq!(orders.wanted(&"m".into(), &"a".into()), None, "another node");
        orders.order(order("b", ASLEEP));
        assert_eq!(taken.recv().await, order("b", ASLEEP));
        // A reader that begins anew gets them all.
        assert_eq!(orders.all(), [order("a", ASLEEP), order("b", ASLEEP)]);
    }

    #[tokio::test]
    async fn a_withdrawn_order_stands_no_more_and_its_reader_learns_that() {
        let (orders, mut taken) = EngineOrders::new();
        orders.order(order("a", WantedState::Awake));
        assert_eq!(taken.recv().await, order("a", WantedState::Awake));
        orders.order(withdrawal("a"));
        assert!(orders.all().is_empty() && orders.wanted(&"n".into(), &"a".into()).is_none());
        assert_eq!(taken.recv().await, withdrawal("a"));
        // Before the reader has taken the order, too, and without an effect on others.
        orders.order(order("a", WantedState::Awake));
        orders.order(order("b", ASLEEP));
        orders.order(withdrawal("a"));
        assert_eq!([taken.recv().await, taken.recv().await], [withdrawal("a"), order("b", ASLEEP)]);
        assert!(taken.recv().now_or_never().is_none());
        assert_eq!(orders.all(), [order("b", ASLEEP)]);
    }

    #[tokio::test]
    async fn a_report_is_there_for_who_asks_later_and_repeats_wake_nobody() {
        let (orders, _taken) = EngineOrders::new();
        let (node, requester) = (NodeName::from("n"), RequesterId::from("a"));
        let publish = |report| orders.publish(&node, |_| Some(report));
        publish(EngineReport::Awake);
        assert_eq!(*orders.reports(&requester).borrow(), None, "nothing was ordered");
        orders.order(order("a", WantedState::Awake));
        publish(EngineReport::Moving);
        let mut reports = orders.reports(&requester);
        assert_eq!(*reports.borrow_and_update(), Some(EngineReport::Moving));
        publish(EngineReport::Moving);
        assert!(!reports.has_changed().unwrap());
        publish(EngineReport::Awake);
        assert!(reports.has_changed().unwrap());
        assert_eq!(*reports.borrow_and_update(), Some(EngineReport::Awake));
    }

    #[tokio::test]
    async fn nothing_is_left_of_a_requester_that_is_gone_or_of_a_term_that_ended() {
        let (orders, mut taken) = EngineOrders::new();
        let (node, requester) = (NodeName::from("n"), RequesterId::from("a"));
        orders.order(order("a", ASLEEP));
        let reports = orders.reports(&requester);
        orders.forget(&node, &requester);
        assert!(reports.has_changed().is_err(), "its sender is dropped");
        assert!(taken.recv().now_or_never().is_none());
        assert!(orders.all().is_empty());
        // The engine's task may see later than the pairing controller that the requester is gone.
        orders.order(order("a", WantedState::Awake));
        orders.forget(&node, &requester);
        assert!(orders.all().is_empty() && orders.wanted(&node, &requester).is_none());
        assert!(taken.recv().now_or_never().is_none());
        orders.order(order("b", ASLEEP));
        orders.publish(&node, |_| Some(EngineReport::Moving));
        orders.clear();
        assert!(taken.recv().now_or_never().is_none());
        assert!(orders.all().is_empty());
        assert_eq!(*orders.reports(&"b".into()).borrow(), None, "the next term has its own reports");
    }
}
