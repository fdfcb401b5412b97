/*
 * Writes and reads what a NIC does, with the public structures and helpers of rdma-core alone.
 * One question a line, numbers in hex; one answer a line. See mod.rs for who asks.
 */
#include <endian.h>
#include <infiniband/mlx5dv.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void need(int read, int wanted)
{
	if (read != wanted) {
		fprintf(stderr, "a question that is not understood\n");
		exit(2);
	}
}

static void print(const void *at, size_t count)
{
	for (size_t i = 0; i < count; i++)
		printf("%02x", ((const uint8_t *)at)[i]);
	printf("\n");
}

static void read_bytes(void *to, size_t count)
{
	for (size_t i = 0; i < count; i++)
		need(scanf("%2" SCNx8, (uint8_t *)to + i), 1);
}

/* operation index number signalled fence immediate address key, then the data */
static void entry(void)
{
	/* A slot is not cleared before it is used again. */
	uint8_t slot[64];
	memset(slot, 0xa5, sizeof(slot));
	struct mlx5_wqe_ctrl_seg *ctrl = (void *)slot;
	struct mlx5_wqe_raddr_seg *raddr = (void *)(ctrl + 1);
	struct mlx5_wqe_data_seg *data = (void *)(raddr + 1);
	struct mlx5_wqe_inl_data_seg *inl = (void *)(raddr + 1);
	char operation[16], kind[16];
	uint16_t index;
	uint32_t number, immediate, key;
	uint64_t address;
	unsigned int signalled, fence;
	uint8_t opcode = MLX5_OPCODE_NOP;
	size_t used = sizeof(*ctrl);

	need(scanf("%15s %" SCNx16 " %" SCNx32 " %u %u %" SCNx32 " %" SCNx64 " %" SCNx32 " %15s",
		   operation, &index, &number, &signalled, &fence, &immediate, &address, &key, kind),
	     9);
	if (strcmp(operation, "nop")) {
		opcode = strcmp(operation, "write") ? MLX5_OPCODE_RDMA_WRITE_IMM : MLX5_OPCODE_RDMA_WRITE;
		raddr->raddr = htobe64(address);
		raddr->rkey = htobe32(key);
		used += sizeof(*raddr);
	}
	if (!strcmp(kind, "inline")) {
		uint32_t count;
		need(scanf("%" SCNx32, &count), 1);
		if (count > 28)
			need(0, 1);
		if (count > 0) {
			inl->byte_count = htobe32(MLX5_INLINE_SEG | count);
			read_bytes(inl + 1, count);
			used += (sizeof(*inl) + count + 15) / 16 * 16;
		}
	} else {
		unsigned int segments = !strcmp(kind, "one") ? 1 : !strcmp(kind, "two") ? 2 : 0;
		for (unsigned int i = 0; i < segments; i++) {
			uint32_t count, lkey;
			uint64_t from;
			need(scanf("%" SCNx32 " %" SCNx32 " %" SCNx64, &count, &lkey, &from), 3);
			mlx5dv_set_data_seg(data + i, count, lkey, from);
			used += sizeof(*data);
		}
	}
	mlx5dv_set_ctrl_seg(ctrl, index, opcode, 0, number,
			    (signalled ? MLX5_WQE_CTRL_CQ_UPDATE : 0) | (fence ? MLX5_WQE_CTRL_FENCE : 0),
			    used / 16, 0, htobe32(immediate));
	print(slot, sizeof(slot));
}

/* next index of receives and of sends */
static void record(void)
{
	uint16_t receives, sends;
	__be32 halves[2];
	need(scanf("%" SCNx16 " %" SCNx16, &receives, &sends), 2);
	halves[MLX5_RCV_DBR] = htobe32(receives);
	halves[MLX5_SND_DBR] = htobe32(sends);
	print(halves, sizeof(halves));
}

/* 64 bytes */
static void completion(void)
{
	union {
		struct mlx5_cqe64 good;
		struct mlx5_err_cqe bad;
	} cqe;
	read_bytes(&cqe, sizeof(cqe));
	printf("%x %x %x %x %x %x %x %x\n", mlx5dv_get_cqe_opcode(&cqe.good),
	       mlx5dv_get_cqe_owner(&cqe.good), be32toh(cqe.good.sop_drop_qpn) & 0xffffff,
	       be16toh(cqe.good.wqe_counter), be32toh(cqe.good.imm_inval_pkey),
	       be32toh(cqe.good.byte_cnt), cqe.bad.syndrome, cqe.bad.vendor_err_synd);
}

#define PRINT(value) printf(#value " %zx\n", (size_t)(value))

static void facts(void)
{
	PRINT(sizeof(struct mlx5_cqe64));
	PRINT(sizeof(struct mlx5_err_cqe));
	PRINT(MLX5_SEND_WQE_BB);
	PRINT(offsetof(struct mlx5_wqe_ctrl_seg, fm_ce_se));
	PRINT(offsetof(struct mlx5_wqe_ctrl_seg, imm));
	PRINT(offsetof(struct mlx5_cqe64, imm_inval_pkey));
	PRINT(offsetof(struct mlx5_cqe64, byte_cnt));
	PRINT(offsetof(struct mlx5_cqe64, sop_drop_qpn));
	PRINT(offsetof(struct mlx5_cqe64, wqe_counter));
	PRINT(offsetof(struct mlx5_cqe64, op_own));
	PRINT(offsetof(struct mlx5_err_cqe, vendor_err_synd));
	PRINT(offsetof(struct mlx5_err_cqe, syndrome));
	PRINT(offsetof(struct mlx5_err_cqe, s_wqe_opcode_qpn));
	PRINT(offsetof(struct mlx5_err_cqe, wqe_counter));
	PRINT(offsetof(struct mlx5_err_cqe, op_own));
	PRINT(MLX5_CQE_REQ);
	PRINT(MLX5_CQE_RESP_WR_IMM);
	PRINT(MLX5_CQE_REQ_ERR);
	PRINT(MLX5_CQE_RESP_ERR);
	PRINT(MLX5_CQE_INVALID);
	PRINT(MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR);
	PRINT(MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR);
	PRINT(MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
	PRINT(MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
	PRINT(MLX5_CQE_SYNDROME_MW_BIND_ERR);
	PRINT(MLX5_CQE_SYNDROME_BAD_RESP_ERR);
	PRINT(MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR);
	PRINT(MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR);
	PRINT(MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
	PRINT(MLX5_CQE_SYNDROME_REMOTE_OP_ERR);
	PRINT(MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR);
	PRINT(MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR);
	PRINT(MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR);
}

int main(void)
{
	char what[16];
	while (scanf("%15s", what) == 1) {
		if (!strcmp(what, "entry"))
			entry();
		else if (!strcmp(what, "record"))
			record();
		else if (!strcmp(what, "completion"))
			completion();
		else if (!strcmp(what, "facts"))
			facts();
		else
			need(0, 1);
	}
	return 0;
}
