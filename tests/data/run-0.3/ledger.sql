PRAGMA application_id=1733119079;
PRAGMA user_version=8;
BEGIN TRANSACTION;
CREATE TABLE journal (
        id INTEGER PRIMARY KEY, t REAL NOT NULL, type TEXT NOT NULL, data TEXT NOT NULL
    ) STRICT;
INSERT INTO "journal" VALUES(1,1735986310.526439,'WorkAdded','{"kind":"016x64","units":[[1],[2]],"costs_s":[[0.01],[0.01]],"setup_s":0.001}');
INSERT INTO "journal" VALUES(2,1735986310.526439,'WorkAdded','{"kind":"032x64","units":[[3],[4]],"costs_s":[[0.01],[0.01]],"setup_s":0.001}');
INSERT INTO "journal" VALUES(3,1735986310.526439,'WorkAdded','{"kind":"048x64","units":[[5]],"costs_s":[[0.01]],"setup_s":0.001}');
INSERT INTO "journal" VALUES(4,1735986319.038109,'Resumed','{"epoch":1}');
INSERT INTO "journal" VALUES(5,1735986319.038299,'NodeExpected','{"node":"here","slots":["0"]}');
INSERT INTO "journal" VALUES(6,1735986324.984595,'NodeJoined','{"node":"here","slots":["0"]}');
INSERT INTO "journal" VALUES(7,1735986325.950161,'CanaryPassed','{"node":"here","slot":"0","us":93.53499990538694}');
INSERT INTO "journal" VALUES(8,1735986325.950161,'Send','{"attempt":"g0001","node":"here","slot":"0","seq":1,"shapes":[1,2]}');
INSERT INTO "journal" VALUES(9,1735986325.950161,'Send','{"attempt":"g0002","node":"here","slot":"0","seq":2,"shapes":[3,4]}');
INSERT INTO "journal" VALUES(10,1735986325.950161,'Send','{"attempt":"g0003","node":"here","slot":"0","seq":3,"shapes":[5]}');
INSERT INTO "journal" VALUES(11,1735986326.025441,'AttemptStarted','{"attempt":"g0001","node":"here","slot":"0"}');
INSERT INTO "journal" VALUES(12,1735986326.025675,'ShapeStarted','{"attempt":"g0001","shape":1}');
INSERT INTO "journal" VALUES(13,1735986326.043738,'ShapeTuned','{"attempt":"g0001","shape":1}');
INSERT INTO "journal" VALUES(14,1735986326.044038,'ShapeStarted','{"attempt":"g0001","shape":2}');
INSERT INTO "journal" VALUES(15,1735986326.045451,'ShapeRefused','{"attempt":"g0001","shape":2,"reason":"no_candidate","detail":"none of 4 candidates ran"}');
INSERT INTO "journal" VALUES(16,1735986326.045451,'FailShape','{"shape":2,"reason":"no_candidate","detail":"none of 4 candidates ran","attempt":"g0001","confirmed":true}');
INSERT INTO "journal" VALUES(17,1735986326.045633,'AttemptEnded','{"attempt":"g0001","outcome":"done","in_flight":null,"detail":"","seconds":0.019277}');
INSERT INTO "journal" VALUES(18,1735986326.045748,'AttemptStarted','{"attempt":"g0002","node":"here","slot":"0"}');
INSERT INTO "journal" VALUES(19,1735986326.077057,'ShapeStarted','{"attempt":"g0002","shape":3}');
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "meta" VALUES('controller','"18439 on vm"');
INSERT INTO "meta" VALUES('cost','{"setup_s": 0.001, "shape_s": 0.01, "flop_s": 0.0, "weight_s": 0.0, "source": "a first guess for tuner faulty; the next run of a16w16 will know better", "start_s": 1.0, "spread": 5.0}');
INSERT INTO "meta" VALUES('created','1735986310.4383028');
INSERT INTO "meta" VALUES('epoch','1');
INSERT INTO "meta" VALUES('family','"a16w16"');
INSERT INTO "meta" VALUES('run','"20250104-102510-f741"');
INSERT INTO "meta" VALUES('state','"running"');
INSERT INTO "meta" VALUES('tuner','"faulty"');
INSERT INTO "meta" VALUES('units','1.0');
CREATE TABLE offsets (
        node TEXT, slot TEXT, stream TEXT, offset INTEGER NOT NULL DEFAULT 0,
        bad INTEGER NOT NULL DEFAULT 0, last_bad TEXT,
        PRIMARY KEY (node, slot, stream)
    ) STRICT, WITHOUT ROWID;
INSERT INTO "offsets" VALUES('here','','log',161,0,NULL);
INSERT INTO "offsets" VALUES('here','0','E',3804,0,NULL);
INSERT INTO "offsets" VALUES('here','0','L',149,0,NULL);
CREATE TABLE reports (
        attempt TEXT PRIMARY KEY, exit INTEGER, spent TEXT, device TEXT,
        conditions TEXT                 -- JSON: {"before": reading, "after": reading} of worker/device.py
    ) STRICT, WITHOUT ROWID;
INSERT INTO "reports" VALUES('g0001',NULL,'{"measure": 0.013916, "start": 3.516192}','{"gfx": "cpu-x86_64-amx", "cu_num": 2, "device": "replay of synthetic"}','{"after": {"source": "cpu"}, "before": {"source": "cpu"}}');
INSERT INTO "reports" VALUES('g0002',NULL,NULL,'{"gfx": "cpu-x86_64-amx", "cu_num": 2, "device": "replay of synthetic"}','{"before": {"source": "cpu"}}');
CREATE TABLE rows (
        id INTEGER PRIMARY KEY, attempt TEXT NOT NULL, shape INTEGER NOT NULL,
        node TEXT NOT NULL, slot TEXT NOT NULL,
        t REAL NOT NULL,
        winner INTEGER NOT NULL,        -- 1: a valid winner; the first one of its shape's settling attempt settled it
        us REAL, err_ratio REAL, status TEXT NOT NULL, kernel_id INTEGER, split_k INTEGER, kernel_name TEXT NOT NULL, libtype TEXT NOT NULL, tflops REAL, bw REAL, spread REAL, samples INTEGER, detail TEXT NOT NULL,
        gfx TEXT NOT NULL, cu_num INTEGER,
        extra TEXT,                     -- JSON: fields without a column of their own
        note TEXT                       -- why a winner was not accepted
    ) STRICT;
INSERT INTO "rows" VALUES(1,'g0001',1,'here','0',1735986325.980635,0,3.69,0.0075,'ok',0,0,'synthetic_00','replay',0.0,NULL,0.015,101,'','cpu-x86_64-amx',2,NULL,NULL);
INSERT INTO "rows" VALUES(2,'g0001',1,'here','0',1735986325.980763,0,2.4252,0.0075,'ok',1,0,'synthetic_01','replay',0.0,NULL,0.0151,101,'','cpu-x86_64-amx',2,NULL,NULL);
INSERT INTO "rows" VALUES(3,'g0001',1,'here','0',1735986325.980903,0,2.0927,0.0007,'ok',2,0,'synthetic_02','replay',0.0,NULL,0.0015,101,'','cpu-x86_64-amx',2,NULL,NULL);
INSERT INTO "rows" VALUES(4,'g0001',1,'here','0',1735986325.980938,0,-1.0,NULL,'unsupported',3,0,'synthetic_03','replay',NULL,NULL,NULL,NULL,'made up','cpu-x86_64-amx',2,NULL,NULL);
INSERT INTO "rows" VALUES(5,'g0001',1,'here','0',1735986325.980961,1,2.0927,0.0007,'ok',2,0,'synthetic_02','replay',0.0,NULL,0.0015,101,'','cpu-x86_64-amx',2,NULL,NULL);
INSERT INTO "rows" VALUES(6,'g0001',2,'here','0',1735986325.990092,0,-1.0,0.006,'error',0,0,'synthetic_00','replay',0.0,NULL,0.0119,101,'replay: no_candidate','cpu-x86_64-amx',2,NULL,NULL);
INSERT INTO "rows" VALUES(7,'g0001',2,'here','0',1735986325.990185,0,-1.0,0.0056,'error',1,0,'synthetic_01','replay',0.0,NULL,0.0113,101,'replay: no_candidate','cpu-x86_64-amx',2,NULL,NULL);
INSERT INTO "rows" VALUES(8,'g0001',2,'here','0',1735986325.990212,0,-1.0,0.0008,'error',2,0,'synthetic_02','replay',0.0,NULL,0.0017,101,'replay: no_candidate','cpu-x86_64-amx',2,NULL,NULL);
INSERT INTO "rows" VALUES(9,'g0001',2,'here','0',1735986325.990234,0,-1.0,NULL,'error',3,0,'synthetic_03','replay',NULL,NULL,NULL,NULL,'replay: no_candidate','cpu-x86_64-amx',2,NULL,NULL);
CREATE TABLE shapes (
        id INTEGER PRIMARY KEY,
        key TEXT NOT NULL UNIQUE,       -- JSON list in the order of the family's key columns
        skipped TEXT,                   -- why it is not to be tuned: '' (a table has it) or 'not_worth_it'
        detail TEXT, skipped_at REAL
    ) STRICT;
INSERT INTO "shapes" VALUES(1,'[1,16,64,"False","torch.bfloat16","torch.bfloat16","False","False"]',NULL,NULL,NULL);
INSERT INTO "shapes" VALUES(2,'[2,16,64,"False","torch.bfloat16","torch.bfloat16","False","False"]',NULL,NULL,NULL);
INSERT INTO "shapes" VALUES(3,'[1,32,64,"False","torch.bfloat16","torch.bfloat16","False","False"]',NULL,NULL,NULL);
INSERT INTO "shapes" VALUES(4,'[2,32,64,"False","torch.bfloat16","torch.bfloat16","False","False"]',NULL,NULL,NULL);
INSERT INTO "shapes" VALUES(5,'[1,48,64,"False","torch.bfloat16","torch.bfloat16","False","False"]',NULL,NULL,NULL);
CREATE TABLE slots (
        node TEXT, slot TEXT, info TEXT, device TEXT, PRIMARY KEY (node, slot)
    ) STRICT, WITHOUT ROWID;
INSERT INTO "slots" VALUES('here','0','{"pid": 18698, "epoch": 1, "protocol": 1, "code": "087a3c24d462dc16", "host": "vm", "python": "3.11.7", "executable": "/opt/gemmfleet/0.3/bin/python3", "machine": "x86_64", "kernel": "6.8.0-4-generic", "cpu": "Intel(R) Xeon(R) Processor", "cores": 2, "memory": 25276510208, "gpus": [], "gfx": "cpu-x86_64-amx", "cu_num": 2, "device": "Intel(R) Xeon(R) Processor"}','{"gfx": "cpu-x86_64-amx", "cu_num": 2, "device": "replay of synthetic", "versions": {"replay": "1"}}');
CREATE TABLE withheld (
        attempt TEXT NOT NULL, shape INTEGER NOT NULL,
        candidate TEXT NOT NULL,        -- JSON: its identity
        node TEXT NOT NULL, slot TEXT NOT NULL,
        entry TEXT NOT NULL,            -- JSON: key, slot, image, driver, t as the worker named them
        name TEXT NOT NULL, outcome TEXT NOT NULL, detail TEXT NOT NULL,
        source TEXT NOT NULL,           -- attempt: it faulted in it; blocklist: before
        confirmed INTEGER NOT NULL,     -- 1: the blocklist had it from two slots already
        PRIMARY KEY (attempt, shape, candidate)
    ) STRICT, WITHOUT ROWID;
CREATE INDEX rows_by_attempt ON rows (attempt, shape);
CREATE INDEX winners ON rows (attempt, shape) WHERE winner=1;
CREATE TRIGGER rows_no_DELETE BEFORE DELETE ON rows BEGIN SELECT RAISE(ABORT, 'rows is append-only'); END;
CREATE TRIGGER rows_no_UPDATE BEFORE UPDATE ON rows BEGIN SELECT RAISE(ABORT, 'rows is append-only'); END;
CREATE TRIGGER journal_no_DELETE BEFORE DELETE ON journal BEGIN SELECT RAISE(ABORT, 'journal is append-only'); END;
CREATE TRIGGER journal_no_UPDATE BEFORE UPDATE ON journal BEGIN SELECT RAISE(ABORT, 'journal is append-only'); END;
CREATE INDEX withheld_by_shape ON withheld (shape);
COMMIT;
