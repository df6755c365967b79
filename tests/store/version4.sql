BEGIN TRANSACTION;
CREATE TABLE adapters (
	model TEXT NOT NULL, 
	lora_id TEXT NOT NULL, 
	uid TEXT NOT NULL, 
	source TEXT NOT NULL, 
	place TEXT NOT NULL, 
	filename TEXT NOT NULL, 
	sha256 TEXT NOT NULL, 
	size_bytes BIGINT NOT NULL, 
	format TEXT NOT NULL, 
	pinned SMALLINT NOT NULL, 
	create_time DOUBLE NOT NULL, 
	tenant TEXT NOT NULL, 
	subject TEXT NOT NULL, 
	PRIMARY KEY (model, lora_id)
);
INSERT INTO "adapters" VALUES('tiny','style','style#1','HUB','org/style@0123','style.safetensors','cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd',9,'peft',1,8.5,'studio','ann');
CREATE TABLE artifacts (
	artifact_id TEXT NOT NULL, 
	job_id TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	size_bytes BIGINT NOT NULL, 
	create_time DOUBLE NOT NULL, 
	PRIMARY KEY (artifact_id)
);
INSERT INTO "artifacts" VALUES('output-1','job-full','studio',5,7.0);
CREATE TABLE assets (
	id TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	mime_type TEXT NOT NULL, 
	size_bytes BIGINT NOT NULL, 
	sha256 TEXT NOT NULL, 
	create_time DOUBLE NOT NULL, 
	expire_time DOUBLE NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "assets" VALUES('upload-1','studio','image/png',7,'abababababababababababababababababababababababababababababababab',1.0,4000000000.0);
CREATE TABLE deliveries (
	id TEXT NOT NULL, 
	job_id TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	state TEXT NOT NULL, 
	url TEXT NOT NULL, 
	host TEXT NOT NULL, 
	secret_name TEXT NOT NULL, 
	body BLOB NOT NULL, 
	create_time DOUBLE NOT NULL, 
	due DOUBLE NOT NULL, 
	attempts INTEGER NOT NULL, 
	last_error TEXT NOT NULL, 
	outcome TEXT NOT NULL, 
	end_time DOUBLE, 
	claimed_by TEXT NOT NULL, 
	claimed_until DOUBLE NOT NULL, trace TEXT, 
	PRIMARY KEY (id)
);
INSERT INTO "deliveries" VALUES('job-full-running','job-full','studio','RUNNING','https://hooks.test/a','hooks.test','studio',X'7B2261223A20317DFF',5.0,12.5,1,'it answered with HTTP status 500','PENDING',NULL,'',0.0,'{"trace_id":"0af7651916cd43dd8448eb211c80319c","span_id":"b7ad6b7169203331","sampled":true,"state":"a=1","ours":true}');
INSERT INTO "deliveries" VALUES('job-full-queued','job-full','studio','QUEUED','https://hooks.test/a','hooks.test','studio',X'',4.0,5.0,1,'','DELIVERED',6.5,'',0.0,NULL);
CREATE TABLE events (
	job_id TEXT NOT NULL, 
	seq BIGINT NOT NULL, 
	time DOUBLE NOT NULL, 
	kind TEXT NOT NULL, 
	body TEXT NOT NULL, 
	PRIMARY KEY (job_id, seq)
)
 WITHOUT ROWID

;
INSERT INTO "events" VALUES('job-full',1,1786300001.0,'Queued','{"position":3,"queue_depth":4}');
INSERT INTO "events" VALUES('job-full',2,1786300002.0,'Started','{"model":"text 3","seeds":[4],"width":5,"height":6,"total_steps":7,"queue_wait":8.25,"warnings":[{"code":"text 9","field":"text 10","message":"text 11","requested":"text 12","applied":"text 13"}],"attempt":10}');
INSERT INTO "events" VALUES('job-full',3,1786300003.0,'Retrying','{"failure":{"code":"NOT_FOUND","reason":"text 4","message":"text 5","violations":[{"field":"text 6","description":"text 7"}],"retry_after":7.25,"metadata":{"key 8":"text 8"}},"attempt":4,"max_attempts":5,"delay":6.25}');
INSERT INTO "events" VALUES('job-full',4,1786300004.0,'EncodeDone','{"elapsed":3.25,"prompt_tokens":4}');
INSERT INTO "events" VALUES('job-full',5,1786300005.0,'StepProgress','{"step":3,"total_steps":4,"sigma":5.25,"timestep":6.25,"step_time":7.25,"elapsed":8.25,"eta":9.25,"rows_total":10,"rows_reused":11,"evals":12,"segment":13,"total_segments":14}');
INSERT INTO "events" VALUES('job-full',6,1786300006.0,'Preempted','{"completed_steps":3,"reason":"text 4","position":5}');
INSERT INTO "events" VALUES('job-full',7,1786300007.0,'Resumed','{"completed_steps":3,"wait":4.25}');
INSERT INTO "events" VALUES('job-full',8,1786300008.0,'DecodeProgress','{"done_units":3,"total_units":4}');
INSERT INTO "events" VALUES('job-full',9,1786300009.0,'ArtifactReady','{"artifact":{"artifact_id":"text 3","job_id":"text 4","index":5,"mime_type":"text 6","size_bytes":7,"sha256":"text 8","width":9,"height":10,"seed":11,"num_frames":12,"fps":13.25,"sample_rate_hz":14,"duration":15.25,"has_alpha":true,"layer":17}}');
INSERT INTO "events" VALUES('job-full',10,1786300010.0,'Completed','{"artifacts":[{"artifact_id":"text 3","job_id":"text 4","index":5,"mime_type":"text 6","size_bytes":7,"sha256":"text 8","width":9,"height":10,"seed":11,"num_frames":12,"fps":13.25,"sample_rate_hz":14,"duration":15.25,"has_alpha":true,"layer":17}],"effective":{"attention_backend":"text 4","quantized_layers":{"key 5":5},"kept_layers":6,"batch_invariant":true,"width":8,"height":9,"steps":10,"evals":11,"seeds":[12],"guidance":{"scale":13.25,"true_cfg_scale":14.25,"norm":"NONE","rescale":16.25,"interval_start":17.25,"interval_end":18.25,"scale_low_noise":19.25,"boundary_ratio":20.25},"scheduler":"text 14","output_format":"RAW_RGB8","strength":16.25,"layers":17,"num_frames":18,"fps":19.25,"output_fps":20.25,"duration":21.25,"sample_rate_hz":22,"cache":{"rel_l1_thresh":23.25,"coefficients":[24.25]},"loras":[{"lora_id":"text 24","scale":25.25,"target":"text 26","keys_applied":27,"keys_skipped":28}],"defaults_used":{"key 25":"text 25"},"dropped_tokens":{"key 26":26}},"warnings":[{"code":"text 5","field":"text 6","message":"text 7","requested":"text 8","applied":"text 9"}],"stats":{"queue_wait":6.25,"encode":7.25,"denoise":8.25,"decode":9.25,"total":10.25,"steps_run":11,"steps_cached":12,"cache":[{"component":"text 13","hits":14,"misses":15,"measured":16,"change":17.25}],"peak_memory_bytes":14,"stage_durations":{"key 15":15.25}}}');
INSERT INTO "events" VALUES('job-full',11,1786300011.0,'Failed','{"failure":{"code":"NOT_FOUND","reason":"text 4","message":"text 5","violations":[{"field":"text 6","description":"text 7"}],"retry_after":7.25,"metadata":{"key 8":"text 8"}},"stats":{"queue_wait":4.25,"encode":5.25,"denoise":6.25,"decode":7.25,"total":8.25,"steps_run":9,"steps_cached":10,"cache":[{"component":"text 11","hits":12,"misses":13,"measured":14,"change":15.25}],"peak_memory_bytes":12,"stage_durations":{"key 13":13.25}}}');
INSERT INTO "events" VALUES('job-full',12,1786300012.0,'Cancelled','{"reason":"text 3","completed_steps":4,"stats":{"queue_wait":5.25,"encode":6.25,"denoise":7.25,"decode":8.25,"total":9.25,"steps_run":10,"steps_cached":11,"cache":[{"component":"text 12","hits":13,"misses":14,"measured":15,"change":16.25}],"peak_memory_bytes":13,"stage_durations":{"key 14":14.25}}}');
CREATE TABLE gone (
	name TEXT NOT NULL, 
	cause TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	time DOUBLE NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "gone" VALUES('job-0003','EXPIRED','',1.79597283343230986591e+09);
CREATE TABLE inputs (
	job_id TEXT NOT NULL, 
	blob TEXT NOT NULL, 
	PRIMARY KEY (job_id, blob)
)
 WITHOUT ROWID

;
INSERT INTO "inputs" VALUES('job-full','text 13');
CREATE TABLE jobs (
	id TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	subject TEXT NOT NULL, 
	model TEXT NOT NULL, 
	task TEXT NOT NULL, 
	state TEXT NOT NULL, 
	ended SMALLINT NOT NULL, 
	create_time DOUBLE NOT NULL, 
	start_time DOUBLE, 
	end_time DOUBLE, 
	expire_time DOUBLE, 
	priority BIGINT NOT NULL, 
	request_id TEXT NOT NULL, 
	fingerprint BLOB NOT NULL, 
	client_job_id TEXT NOT NULL, 
	labels TEXT NOT NULL, 
	server TEXT NOT NULL, 
	reserved_seq BIGINT NOT NULL, 
	restarts INTEGER NOT NULL, 
	cancel_reason TEXT, 
	spec TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "jobs" VALUES('job-full','studio','text 10','text 5','text 6','RUNNING',0,8.25,11.25,12.25,13.25,14,'r-1',X'FF00','text 17','{"project": "x"}','one',20,21,'text 22','{"request":{"preview":{"every_steps":3,"max_edge_px":4,"format":"JPEG"},"strength":5.25,"layers":6,"num_frames":7,"fps":8.25,"output_fps":9.25,"duration":10.25,"start":11.25,"sample_rate_hz":12,"text":"text 13","scheduler":"text 14","loras":[{"lora_id":"text 15","scale":16.25,"target":"text 17"}],"extra":{"key 16":[null,1.5]},"id":"text 17","model":"text 18","prompt":"text 19","task":"VIDEO_EDIT","negative_prompt":"text 21","width":22,"height":23,"steps":24,"guidance":{"scale":25.25,"true_cfg_scale":26.25,"norm":"NONE","rescale":28.25,"interval_start":29.25,"interval_end":30.25,"scale_low_noise":31.25,"boundary_ratio":32.25},"seeds":[26],"num_outputs":27,"output_format":"PNG","cache":{"rel_l1_thresh":29.25,"coefficients":[30.25]}},"segments":4,"warnings":[{"code":"text 5","field":"text 6","message":"text 7","requested":"text 8","applied":"text 9"}],"defaults_used":{"key 6":"text 6"},"disconnect_grace":7.25,"retention":8.25,"queue_timeout":9.25,"run_timeout":10.25,"deadline":11.25,"requeue":true,"inputs":[{"blob":"text 13","path":"text 14","name":"text 15","mime_type":"text 16"}],"webhook":{"url":"text 14","secret_name":"text 15","states":["CANCELLED"]}}');
INSERT INTO "jobs" VALUES('job-0002','studio','','tiny','TEXT_TO_IMAGE','QUEUED',0,2.0,NULL,NULL,NULL,0,'r-2',X'','','{}','one',0,0,NULL,'{"request":{"preview":null,"strength":null,"layers":null,"num_frames":null,"fps":null,"output_fps":null,"duration":null,"start":null,"sample_rate_hz":null,"text":"","scheduler":"","loras":[],"extra":{},"id":"request","model":"tiny","prompt":"a red circle","task":"TEXT_TO_IMAGE","negative_prompt":null,"width":64,"height":64,"steps":4,"guidance":{"scale":null,"true_cfg_scale":1.0,"norm":"NONE","rescale":0.0,"interval_start":0.0,"interval_end":1.0,"scale_low_noise":null,"boundary_ratio":null},"seeds":[7],"num_outputs":1,"output_format":"PNG","cache":null},"segments":1,"warnings":[],"defaults_used":{},"disconnect_grace":null,"retention":600.0,"queue_timeout":null,"run_timeout":null,"deadline":null,"requeue":false,"inputs":[],"webhook":null}');
CREATE TABLE labels (
	tenant TEXT NOT NULL, 
	name TEXT NOT NULL, 
	value TEXT NOT NULL, 
	create_time DOUBLE NOT NULL, 
	job_id TEXT NOT NULL, 
	PRIMARY KEY (tenant, name, value, create_time, job_id)
)
 WITHOUT ROWID

;
INSERT INTO "labels" VALUES('studio','project','x',8.25,'job-full');
CREATE TABLE omni_grpc_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT omni_grpc_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "omni_grpc_version" VALUES('0004');
CREATE TABLE servers (
	name TEXT NOT NULL, 
	until DOUBLE NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "servers" VALUES('one',1786300060.0);
CREATE UNIQUE INDEX jobs_by_request ON jobs (tenant, request_id) WHERE request_id <> '';
CREATE INDEX jobs_by_time ON jobs (create_time, id);
CREATE INDEX jobs_by_state ON jobs (state, create_time, id);
CREATE INDEX jobs_by_model ON jobs (model, create_time, id);
CREATE INDEX jobs_by_tenant ON jobs (tenant, create_time, id);
CREATE INDEX jobs_by_tenant_state ON jobs (tenant, state, create_time, id);
CREATE INDEX jobs_by_tenant_model ON jobs (tenant, model, create_time, id);
CREATE INDEX jobs_unfinished ON jobs (server, create_time, id) WHERE ended = 0;
CREATE INDEX jobs_queued ON jobs (model, priority, create_time) WHERE state = 'QUEUED';
CREATE INDEX jobs_expiring ON jobs (expire_time, id) WHERE expire_time IS NOT NULL;
CREATE INDEX jobs_ended ON jobs (tenant, end_time, id) WHERE end_time IS NOT NULL;
CREATE INDEX labels_of_all ON labels (name, value, create_time, job_id);
CREATE INDEX inputs_by_blob ON inputs (blob);
CREATE INDEX artifacts_by_job ON artifacts (job_id, create_time, artifact_id);
CREATE INDEX artifacts_by_tenant ON artifacts (tenant, create_time, artifact_id);
CREATE INDEX artifacts_by_time ON artifacts (create_time, artifact_id);
CREATE INDEX assets_expiring ON assets (expire_time, id);
CREATE INDEX gone_by_time ON gone (time);
CREATE INDEX deliveries_due ON deliveries (due, host) WHERE outcome = 'PENDING';
CREATE INDEX deliveries_by_host ON deliveries (host, due, id) WHERE outcome = 'PENDING';
CREATE INDEX deliveries_claimed ON deliveries (claimed_by) WHERE claimed_by <> '';
CREATE INDEX deliveries_ended ON deliveries (end_time) WHERE end_time IS NOT NULL;
CREATE INDEX deliveries_by_job ON deliveries (job_id, create_time, id);
COMMIT;
