use planner::{restrict::Restrictions, search::Task, case::{Case, ground::Ground}};
fn main() {
    let model = models::model::shipped("llama70b").unwrap().unwrap();
    let cluster = models::cluster::shipped("dgx_h100").unwrap().unwrap();
    let r = Restrictions::parse(&["tp=8","pp=1","cp=1","micro_batch=1","zero_stage=2","dp_shard=8","schedule=1f1b","sequence_parallel=true"]).unwrap();
    let task = Task::new(&model, &cluster, 16384, &r);
    let node = &task.space().nodes()[0];
    let mut d = node.decisions.clone();
    d.zero_stage = 2; d.dp_shard = 8;
    let g = Ground::new(&model, &cluster, 16384);
    println!("{}", planner::case::least_layer_state_s(&g, &d));
    let c = Case::new(&g, d).unwrap();
    println!("{:?} mean {}", c.least_state_s(), c.mean_bound_s());
    let s = c.stage(0, 0, 80);
    println!("{:?}", s);
}
